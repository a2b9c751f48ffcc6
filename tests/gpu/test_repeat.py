"""Runs of `penstock train` with default flags repeat to the bit on the GPU.

`bench/repeat_campaign.py` compares more runs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import repeat_campaign

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("data", repeat_campaign.DATA)
@pytest.mark.parametrize("family", repeat_campaign.FAMILIES)
def test_runs_repeat_to_the_bit(family: str, data: str, tmp_path: Path) -> None:
    words = ["--families", family, "--data", data, "--workers", "2", "--out", str(tmp_path)]

    code = repeat_campaign.main([*words, "--arms", "again", "killed, to nvme"])

    results = json.loads((tmp_path / "results.json").read_text())
    assert code == 0, json.dumps(results["combinations"], indent=1)
