"""Runs of `penstock train` with default flags repeat to the bit on the GPU.

`bench/repeat_campaign.py` compares more runs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import repeat_campaign

pytestmark = pytest.mark.gpu


SAMPLE = {("llama", "rows"), ("gemma2", "chats")}
"""Cases of `make test-gpu`. The others run with `--long`: a case starts ten programs."""


@pytest.mark.parametrize(
    ("family", "data"),
    [
        pytest.param(family, data, marks=() if (family, data) in SAMPLE else pytest.mark.long)
        for family in repeat_campaign.FAMILIES
        for data in repeat_campaign.DATA
    ],
)
def test_runs_repeat_to_the_bit(family: str, data: str, tmp_path: Path) -> None:
    words = ["--families", family, "--data", data, "--workers", "2", "--out", str(tmp_path)]

    code = repeat_campaign.main([*words, "--arms", "again", "killed, to nvme"])

    results = json.loads((tmp_path / "results.json").read_text())
    assert code == 0, json.dumps(results["combinations"], indent=1)
