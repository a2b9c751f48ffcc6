"""Measure how fast the machine is: `penstock probe`.

docs/probe.md explains what each figure means and what it does not mean.
"""

from penstock.probe.measurement import OnProgress
from penstock.probe.session import ProbeOptions, ProbeResult, probe

__all__ = ["OnProgress", "ProbeOptions", "ProbeResult", "probe"]
