"""A run whose NVMe changes a bit ends with an error, keeps its checkpoints and can be resumed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.run_directory import list_checkpoints
from penstock.engine.engine import Engine
from penstock.roles import Role
from penstock.settings import read_yaml
from tests.support.bit_flips import flip_any_bit
from tests.train.conftest import STEPS
from tests.train.runs import RunResult, Runs, contents

Whole = tuple[Path, RunResult]


def flip_at(monkeypatch: pytest.MonkeyPatch, batch: int, *, after: bool = False) -> list[str]:
    """Flip a bit of a moment before or after the step of a batch. Return the name of the extent."""
    plain, flipped = Engine.step, list[str]()

    def flip(engine: Engine) -> None:
        if engine.batches != batch + after or flipped:
            return
        tiers = engine._memory.tiers
        extent = next(
            extent for (_, role, _), extent in tiers._extents.items() if role is Role.SECOND
        )
        assert tiers.store is not None
        flip_any_bit(tiers.store, extent, random.Random(batch))
        flipped.append(extent.name)

    def step(self: Engine, given: Any) -> Any:
        if not after:
            flip(self)
        loss = plain(self, given)
        if after:
            self.finish()
            flip(self)
        return loss

    monkeypatch.setattr(Engine, "step", step)
    return flipped


@pytest.mark.parametrize("after", [False, True], ids=["before a step", "before the last save"])
def test_a_flipped_bit_ends_the_run_and_the_last_checkpoint_resumes(
    after: bool, runs: Runs, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    flags = [*runs.tight(), "--steps", str(STEPS), "--save-every", "2"]
    with monkeypatch.context() as patches:
        flipped = flip_at(patches, STEPS - 1 if after else 3, after=after)
        result = runs.run(out, *flags)

    assert result.code == 1, result.errors
    assert "Traceback" not in result.errors
    assert f"{flipped[0]}: the disk returned different bytes than were written" in result.errors
    assert f"{runs.disk}/penstock-" in result.errors
    assert [checkpoint.step for checkpoint in list_checkpoints(out).whole] == (
        [4, 2] if after else [2]
    )
    assert not list_checkpoints(out).damaged
    assert not list(out.glob(".*tmp*"))
    assert list(runs.disk.iterdir()) == []  # the store was removed

    assert runs.run(out, *flags, "--resume").code == 0
    assert contents(out) == contents(whole[0])


def test_checksums_can_be_switched_off_and_the_run_records_it(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    flipped = flip_at(monkeypatch, 1)
    result = runs.run(out, *runs.tight(), "--steps", "3", "--no-store-checksums")

    assert flipped
    assert result.code == 0, result.errors
    assert read_yaml(out / "run.yaml")["store_checksums"] is False
