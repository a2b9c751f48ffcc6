"""The directory that `penstock profile` puts in front of a program's PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

INJECTED = Path(__file__).parent

SETTINGS = "PENSTOCK_OBSERVE"
"""Environment variable with the settings of the recording, as JSON."""
