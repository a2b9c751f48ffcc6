"""How fast the machine is, measured. Room: measure.

docs/probe.md says what each figure means and what it does not.
"""

from penstock.probe.measurement import OnProgress
from penstock.probe.session import ProbeOptions, ProbeResult, probe

__all__ = ["OnProgress", "ProbeOptions", "ProbeResult", "probe"]
