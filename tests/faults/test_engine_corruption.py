"""A bit that changes on NVMe during training is an error, or it cannot affect the result."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.engine import Engine
from penstock.planner.resource_names import ROLE_NAMES
from penstock.roles import STATE, Role
from penstock.storage.errors import ChecksumError
from penstock.storage.layout import Extent
from penstock.storage.store import Store
from penstock.storage.tickets import StoreTicket
from tests.equivalence.runs import DISK, RESIDENT, WAYS, Way, differing, state_of
from tests.faults.engine_runs import SMALL, engine_threads, small_setup
from tests.support.bit_flips import flip_any_bit

pytestmark = pytest.mark.usefixtures("one_thread")

THREADS, ROUNDS = WAYS[5], WAYS[8]


def extents_of(engine: Engine) -> dict[tuple[int, Role, int], Extent]:
    return engine._memory.tiers._extents


def finish_step(engine: Engine, batch: Any) -> None:
    engine.step(batch)
    engine.finish()  # the optimizer sweep may still run when `step` returns


@pytest.mark.parametrize("way", [SMALL, THREADS, ROUNDS], ids=lambda way: way.name)
@pytest.mark.parametrize("role", [Role.WEIGHT, Role.GRADIENT, Role.ACTIVATION, *STATE])
def test_a_flip_before_any_read_ends_the_step_and_names_the_tensor(
    way: Way, role: Role, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bit is flipped while the step runs: gradients and activations live only that long."""
    setup, plain = small_setup(), Store.start_read
    first, second = setup.batches(2)
    draw, flipped = random.Random(str(role) + way.name), list[tuple[str, str, int]]()

    def start_read(self: Store, extent: Extent, *args: Any, **kwargs: Any) -> StoreTicket:
        wanted = armed and extent.name.startswith(f"{ROLE_NAMES[role]} of ")
        if wanted and not flipped and draw.random() < 0.3:
            flipped.append((extent.name, *flip_any_bit(self, extent, draw)))
        return plain(self, extent, *args, **kwargs)

    armed = False
    monkeypatch.setattr(Store, "start_read", start_read)
    engine = setup.engine(way, tmp_path)
    try:
        engine.step(first)
        armed = True
        with pytest.raises(ChecksumError, match="different bytes than were written") as caught:
            finish_step(engine, second)
        error = caught.value
        assert [(error.extent, error.path, error.offset)] == flipped
    finally:
        engine.close()
    assert engine_threads() == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(n, marks=pytest.mark.long) for n in range(4, 60))]
)
def test_no_flip_between_steps_changes_the_result_silently(seed: int, tmp_path: Path) -> None:
    setup, draw = small_setup(), random.Random(seed)
    batches = setup.batches(3)
    with setup.engine(RESIDENT, tmp_path) as engine:
        for batch in batches:
            engine.step(batch)
        expected = state_of(engine)
    with setup.engine(draw.choice([DISK, SMALL, THREADS, ROUNDS]), tmp_path) as engine:
        engine.step(batches[0])
        (_, role, _), extent = draw.choice(sorted(extents_of(engine).items()))
        flip_any_bit(engine._memory.store, extent, draw)
        failure, result = None, {}
        try:
            for batch in batches[1:]:
                engine.step(batch)
            result = state_of(engine)
        except ChecksumError as error:
            failure = error
        if failure is not None:
            assert failure.extent == extent.name
            return
        assert role in (Role.GRADIENT, Role.ACTIVATION), extent.name  # written before it is read
        assert differing(result, expected) == []


def test_without_checksums_a_flip_is_not_noticed(tmp_path: Path) -> None:
    """Otherwise the tests above would prove nothing."""
    setup = small_setup()
    way = Way("without checksums", SMALL.spots, SMALL.plan, {"verify": False})
    first, second = setup.batches(2)
    with setup.engine(way, tmp_path) as engine:
        engine.step(first)
        key = min(key for key in extents_of(engine) if key[1] is Role.SECOND)
        flip_any_bit(engine._memory.store, extents_of(engine)[key], random.Random(3))
        engine.step(second)
        state_of(engine)
