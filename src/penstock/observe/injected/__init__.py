"""Where Python finds what `penstock profile` puts in front of a program. Room: show."""

from __future__ import annotations

from pathlib import Path

INJECTED = Path(__file__).parent

SETTINGS = "PENSTOCK_OBSERVE"
"""The variable by which a program is told."""
