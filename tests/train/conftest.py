"""One model and one file of data for all runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.train.runs import RESIDENT, Runs


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the children have it: on the CPU bits hang on threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


STEPS = 6


@pytest.fixture(scope="session")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> object:
    """A run of six steps that nothing disturbed: its directory and what it said."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, runs.run(out, *RESIDENT, "--steps", str(STEPS), "--save-every", "2")
