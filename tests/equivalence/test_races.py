"""The result does not depend on which lane is late."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.equivalence.races import delay_lanes, random_way, thin_setup
from tests.equivalence.runs import RESIDENT, Result, differing, train

STEPS = 3
CAMPAIGN = range(100, 300)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Result:
    import torch

    torch.set_num_threads(1)
    return train(thin_setup(), RESIDENT, tmp_path_factory.mktemp("plain"), steps=STEPS)


def check(seed: int, expected: Result, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = thin_setup()
    way = random_way(seed, len(setup.model.blocks))
    delay_lanes(monkeypatch, seed)

    found = train(setup, way, disk, steps=STEPS)

    assert found.losses == expected.losses, way
    assert differing(found.state, expected.state) == [], way


@pytest.mark.parametrize("seed", range(6))
def test_late_lanes_change_nothing(
    seed: int, expected: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(seed, expected, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("seed", CAMPAIGN)
def test_late_lanes_change_nothing_in_a_long_campaign(
    seed: int, expected: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(seed, expected, tmp_path, monkeypatch)
