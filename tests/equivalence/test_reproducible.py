"""On a GPU, default settings give the same bits in every process, under every plan, after a resume.

The processes start with empty compiler caches, so each one generates and chooses its own kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]

PROCESSES = (("resident", "resident"), ("dram", "disk", "resumed"))
"""The runs of each fresh process."""


def start(number: int, family: str, directory: Path, names: tuple[str, ...]) -> Any:
    """Start a process with compiler caches and a disk of its own."""
    environment = dict(os.environ)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        environment[name] = str(directory / f"{name}-{number}")
    disk = directory / f"disk-{number}"
    disk.mkdir()
    line = [sys.executable, "-W", "ignore", "-m", "tests.equivalence.reproducible"]
    return subprocess.Popen(
        [*line, family, str(disk), *names],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_every_process_plan_and_resume_gives_the_same_bits(family: str, tmp_path: Path) -> None:
    processes = [start(n, family, tmp_path, names) for n, names in enumerate(PROCESSES)]
    results = []
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors[-3000:]
        results += [json.loads(line) for line in output.splitlines() if line.startswith('{"name"')]

    for packed in (False, True):
        first, *others = (result for result in results if result["packed"] is packed)
        assert len(others) == 4
        for other in others:
            differing = [n for n, bits in other["run"].items() if first["run"][n] != bits]
            assert differing == [], f"{other['name']}, packed: {packed}"
            later = {n for n in first["run"] if n not in ("loss 0", "norm 0", "loss 1", "norm 1")}
            assert later <= other["run"].keys()
