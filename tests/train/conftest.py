"""One model and one file of data for all runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.train.runs import RESIDENT, Runs

STEPS = 6


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread, as the child processes do: on the CPU, bits depend on the thread count."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> object:
    """An undisturbed run of six steps: its output directory and its result."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, runs.run(out, *RESIDENT, "--steps", str(STEPS), "--save-every", "2")
