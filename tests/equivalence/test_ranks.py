"""Any number of ranks gives the same result, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoint.errors import CheckpointWriteError, SaveOnRankError
from penstock.checkpoint.writer import ShardWriter
from penstock.distributed.thread_ranks import ThreadRanks
from penstock.engine import compute, rank_exchange, state_io
from penstock.engine.compute import Computer
from penstock.engine.engine import Engine
from penstock.engine.gradients import add_in_order
from penstock.engine.transport import SingleRank
from penstock.errors import EngineError, NonFiniteLossError, PeerLostError
from tests.equivalence.runs import DISK, DRAM, RESIDENT, WAYS, Result, Setup, Way, differing, follow
from tests.equivalence.runs import state_of as state_of_engine
from tests.support.ranks import on_each_rank

MIXED, FAR = WAYS[3], WAYS[8]
SAMPLE = [(WAYS[2], 2), (MIXED, 3), (FAR, 2), (WAYS[7], 4)]
REST = [(way, world) for way in WAYS for world in (2, 3, 4) if (way, world) not in SAMPLE]
Train = Callable[[Engine], Any]


def run_on_ranks(
    setup: Setup, way: Way, disk: Path, world: int, work: Train, **settings: Any
) -> list[Any]:
    """Call `work` with the engine of each rank, in threads; return the results by rank."""
    shared = replace(setup, work=replace(setup.work, world=world))
    group = ThreadRanks(world)
    # One after another: modules of transformers are not made to be built in several threads.
    engines = [shared.engine(way, disk, ranks=each, **settings) for each in group.transports]
    try:
        return on_each_rank(group, lambda transport: work(engines[transport.rank]))
    finally:
        for engine in engines:
            engine.close()


def train_on_ranks(
    setup: Setup, way: Way, disk: Path, world: int, batches: Sequence[Any], **settings: Any
) -> Result:
    """Train; assert that all ranks report the same."""

    def train(engine: Engine) -> Result:
        losses, norms = follow(engine, batches)
        return Result(losses, norms, state_of_engine(engine))

    first, *others = run_on_ranks(setup, way, disk, world, train, **settings)
    for other in others:
        assert_same(first, other)
    return first


def assert_same(first: Result, other: Result) -> None:
    assert other.losses == first.losses
    assert other.norms == first.norms
    assert differing(first.state, other.state) == []


@lru_cache(maxsize=1)
def llama() -> tuple[Setup, Result]:
    """Return a setup of five micro-batches, a ragged last wave for 2, 3 and 4 ranks, on one rank.

    Packed rows and padding are among the batches, and clipping is at work.
    """
    setup = Setup.of("llama", batch=9)
    one = train_on_ranks(setup, RESIDENT, Path(), 1, batches_of(setup))
    assert min(one.norms) > (setup.work.clip or 0)
    return setup, one


def batches_of(setup: Setup) -> list[Any]:
    """Return a full batch, one of packed rows, and one of fewer micro-batches than ranks."""
    full, packed, short = setup.batches(3)
    length = setup.work.context
    positions = torch.cat([torch.arange(5), torch.arange(length - 5)])
    packed["position_ids"] = positions.expand(setup.work.batch, length)
    return [full, packed, {key: value[:3] for key, value in short.items()}, full]


@pytest.mark.parametrize(
    ("way", "world"),
    [
        *SAMPLE,
        *(pytest.param(way, world, marks=pytest.mark.long) for way, world in REST),
    ],
    ids=lambda value: value.name if isinstance(value, Way) else f"{value} ranks",
)
def test_ranks_give_the_result_of_one(way: Way, world: int, tmp_path: Path) -> None:
    setup, one = llama()

    assert_same(one, train_on_ranks(setup, way, tmp_path, world, batches_of(setup)))


@pytest.mark.parametrize(
    ("family", "way", "world", "work"),
    [
        pytest.param("gemma3", MIXED, 2, {"config": {"tie_word_embeddings": True}}, id="tied"),
        pytest.param("gemma3", DRAM, 3, {"config": {"tie_word_embeddings": True},
                                         "loss_chunk": 8, "freeze": ()}, id="tied, chunks"),
        pytest.param("qwen3", MIXED, 2, {"moments": "int8"}, id="int8 moments"),
        pytest.param("qwen3", RESIDENT, 3, {"moments": "bf16"}, id="bf16 moments"),
        pytest.param("llama", MIXED, 3, {"dtype": "fp32"}, id="fp32"),
        pytest.param("llama", MIXED, 3, {"quantize": "nf4", "freeze": ("*_proj.weight",)},
                     id="quantized"),
        pytest.param("llama", FAR, 2, {"loss_chunk": 8, "clip": None}, id="chunks, no clipping"),
    ],
)  # fmt: skip
def test_every_format_is_the_same_on_ranks(
    family: str, way: Way, world: int, work: dict[str, Any], tmp_path: Path
) -> None:
    setup = Setup.of(family, **{"batch": 7} | work)
    batches = setup.batches(3)

    one = train_on_ranks(setup, RESIDENT, tmp_path, 1, batches)

    assert_same(one, train_on_ranks(setup, way, tmp_path, world, batches))


def test_accumulated_gradients_and_evaluation_are_the_same_on_ranks(tmp_path: Path) -> None:
    setup = Setup.of("llama", batch=7, accumulate=True)

    def train(engine: Engine) -> Result:
        losses, norms = [], []
        for first, second in (setup.batches(4)[:2], setup.batches(4)[2:]):
            losses += [float(engine.forward_backward(batch)) for batch in (first, second)]
            engine.apply()
            norms.append(engine.grad_norm)
            losses.append(engine.evaluate([first]).loss)
        return Result(losses, norms, state_of_engine(engine))

    with setup.engine(RESIDENT, tmp_path) as engine:
        one = train(engine)
    for result in run_on_ranks(setup, MIXED, tmp_path, 2, train):
        assert_same(one, result)


def test_logits_and_values_of_tokens_are_the_same_on_ranks(tmp_path: Path) -> None:
    setup = Setup.of("llama", batch=7)
    full, short = setup.batches(2)
    short = {key: value[:1] for key, value in short.items()}  # one rank computes it

    def work(engine: Engine) -> list[torch.Tensor]:
        engine.keeps_token_values = True
        engine.step(full)
        found = list(engine.token_values)
        engine.evaluate([full, short])
        found += engine.token_values
        logits = [engine.logits({"input_ids": b["input_ids"]}) for b in (full, short)]
        return [*logits, *(t for values in found for t in (values.entropy, values.is_top))]

    with setup.engine(RESIDENT, tmp_path) as engine:
        one = work(engine)
    for found in run_on_ranks(setup, MIXED, tmp_path, 3, work):
        assert len(found) == len(one) == 8
        assert all(torch.equal(a, b) for a, b in zip(found, one, strict=True))


# Checkpoints.


def continue_on_ranks(
    setup: Setup, way: Way, folder: Path, world: int, batches: Sequence[Any],
    *, read: str = "", write: str = "",
) -> Result:  # fmt: skip
    """Read a checkpoint, train, and write one."""

    def work(engine: Engine) -> Result:
        if read:
            engine.read(folder / read)
        losses = [float(engine.step(batch)) for batch in batches]
        if write:
            engine.write(folder / write)
        return Result(losses, [engine.grad_norm], state_of_engine(engine))

    return run_on_ranks(setup, way, folder, world, work)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_checkpoints_do_not_depend_on_the_number_of_ranks(moments: str, tmp_path: Path) -> None:
    setup = Setup.of("llama", batch=7, moments=moments)
    batches = setup.batches(2)
    ways = {1: RESIDENT, 2: MIXED, 3: DRAM}
    for world, way in ways.items():
        continue_on_ranks(setup, way, tmp_path, world, batches, write=str(world))

    found = {
        world: {path.name: path.read_bytes() for path in (tmp_path / str(world)).iterdir()}
        for world in ways
    }
    assert {"model.safetensors", "optimizer.safetensors", "complete.json"} <= found[1].keys()
    for world in (2, 3):
        assert found[world].keys() == found[1].keys()
        assert [name for name in found[1] if found[world][name] != found[1][name]] == []


def test_a_run_continues_on_another_number_of_ranks(tmp_path: Path) -> None:
    setup = Setup.of("qwen3", batch=7)
    batches = setup.batches(4)
    whole = continue_on_ranks(setup, RESIDENT, tmp_path, 1, batches)

    continue_on_ranks(setup, DRAM, tmp_path, 3, batches[:2], write="a")
    continue_on_ranks(setup, MIXED, tmp_path, 1, batches[2:3], read="a", write="b")
    resumed = continue_on_ranks(setup, MIXED, tmp_path, 4, batches[3:], read="b")

    assert resumed.losses == whole.losses[3:]
    assert resumed.norms == whole.norms
    assert differing(resumed.state, whole.state) == []


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checkpoints have many files."""
    small = partial(ShardWriter, max_shard_nbytes=40_000)
    monkeypatch.setattr(state_io, "ShardWriter", small)


@pytest.mark.usefixtures("small_shards")
def test_every_rank_writes_some_of_the_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setup = Setup.of("llama", batch=7)
    batches, written, write = setup.batches(1), {}, ShardWriter.write

    def note(self: ShardWriter, *args: Any, rank: int, world: int) -> Any:
        found = write(self, *args, rank=rank, world=world)
        written.setdefault((world, rank), []).extend(found)
        return found

    monkeypatch.setattr(ShardWriter, "write", note)
    for world in (1, 3):
        continue_on_ranks(setup, DRAM, tmp_path, world, batches, write=str(world))

    one, three = (
        {path.name: path.read_bytes() for path in (tmp_path / str(world)).iterdir()}
        for world in (1, 3)
    )
    assert one == three
    shards = [name for name in written[1, 0] if name.endswith(".safetensors")]
    assert len(shards) > 6
    for rank in range(3):
        own = [name for name in written[3, rank] if name.endswith(".safetensors")]
        assert own == [name for name in shards if (int(name.split("-")[1]) - 1) % 3 == rank]
    indices = [name for name in written[1, 0] if name.endswith(".json")]
    assert [name for name in written[3, 0] if name.endswith(".json")] == indices


@pytest.mark.usefixtures("small_shards")
def test_files_that_are_written_at_the_same_time_may_come_from_disk(tmp_path: Path) -> None:
    """All data passes through the same staging memory, whichever file it is for."""
    setup = Setup.of("llama", batch=7)
    for world, way in ((1, RESIDENT), (2, DISK)):
        continue_on_ranks(setup, way, tmp_path, world, setup.batches(1), write=str(world))

    for path in (tmp_path / "1").iterdir():
        assert (tmp_path / "2" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("bad", ["file", "model-00002", "optimizer-00003"])
def test_a_rank_that_cannot_write_fails_the_save_on_all(bad: str, tmp_path: Path) -> None:
    setup = Setup.of("llama", batch=7)
    folder = tmp_path / "first"
    rank = {"file": 0, "model-00002": 1, "optimizer-00003": 2}[bad]
    continue_on_ranks(setup, DRAM, tmp_path, 1, setup.batches(1), write="names")
    if bad == "file":
        folder.write_text("not a directory")
    else:
        folder.mkdir()
        (name,) = [path.name for path in (tmp_path / "names").glob(f"{bad}*")]
        (folder / name).write_text("in the way")

    def work(engine: Engine) -> str:
        engine.step(setup.batches(1)[0])
        with pytest.raises((CheckpointWriteError, SaveOnRankError)) as failed:
            engine.write(folder)
        engine.write(tmp_path / "second")  # as after a full disk that has room again
        return str(failed.value)

    texts = run_on_ranks(setup, DRAM, tmp_path, 3, work)

    assert "File exists" in texts[rank]
    for each, text in enumerate(texts):
        assert text == texts[rank] if each == rank else text == f"rank {rank}: {texts[rank]}"
    for path in (tmp_path / "names").iterdir():
        assert (tmp_path / "second" / path.name).read_bytes() == path.read_bytes()


# The order of the sum.

LARGE = 3e4
"""A gradient that comes and goes: what was added before it loses its lower bits."""


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the gradients of a layer's second and third micro-batch be large and cancel out.

    The sum then depends on its order. The gradients of a tiny model do not: all orders round to
    the same 16 bits.
    """
    current, differentiate = threading.local(), compute.differentiate

    def note(self: Computer, step: Any, block: int, micro: Any) -> None:
        current.number = micro.number

    def large(out: Any, gradient: Any, source: Any, parameters: Any, add: Any, **more: Any) -> None:
        value = {1: LARGE, 2: -LARGE}.get(current.number)

        def replaced(name: str, found: torch.Tensor) -> None:
            add(name, found if value is None else torch.full_like(found, value))

        differentiate(out, gradient, source, parameters, replaced, **more)

    monkeypatch.setattr(Computer, "_seed_dropout", note)
    monkeypatch.setattr(compute, "differentiate", large)


@pytest.mark.usefixtures("hostile")
def test_gradients_are_added_in_the_order_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setup = Setup.of("llama", batch=9)
    batches = setup.batches(2)
    one = train_on_ranks(setup, RESIDENT, tmp_path, 1, batches)

    assert_same(one, train_on_ranks(setup, DRAM, tmp_path, 2, batches))
    assert_same(one, train_on_ranks(setup, DRAM, tmp_path, 3, batches))

    def reversed_order(total: Any, gradients: Any, *, fresh: bool) -> None:
        add_in_order(total, gradients[::-1], fresh=fresh)

    monkeypatch.setattr(rank_exchange, "add_in_order", reversed_order)
    assert train_on_ranks(setup, DRAM, tmp_path, 3, batches).norms != one.norms


# Decisions and failures.


def test_all_ranks_refuse_the_same_batch(tmp_path: Path) -> None:
    """Only rank 1 sees the gradient that is not finite, and all of them raise the same error."""
    setup = Setup.of("llama", batch=4, micro_batch=2)
    good, bad = setup.batches(2)

    def work(engine: Engine) -> tuple[str, str, dict[str, torch.Tensor]]:
        engine.step(good)
        head = engine._computer._loss
        backward = head.backward

        def broken(*args: Any) -> torch.Tensor:
            total: torch.Tensor = backward(*args)
            return total * float("nan") if engine.ranks.rank == 1 else total

        head.backward = broken  # type: ignore[method-assign]
        with pytest.raises(NonFiniteLossError) as first:
            engine.step(bad)
        head.backward = backward  # type: ignore[method-assign]
        return str(first.value), str(engine.steps), state_of_engine(engine)

    (text, steps, state), (other, _, state_too) = run_on_ranks(setup, DRAM, tmp_path, 2, work)

    assert text == other
    assert "the loss is nan" in text
    assert steps == "1"
    assert differing(state, state_too) == []


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_fails_ends_the_others(failing: int, tmp_path: Path) -> None:
    setup = Setup.of("llama", batch=9)
    errors: dict[int, BaseException] = {}

    def work(engine: Engine) -> None:
        if engine.ranks.rank == failing:
            engine.on_progress = fail_in_backward
        try:
            engine.step(setup.batches(1)[0])
        except BaseException as error:
            errors[engine.ranks.rank] = error

    def fail_in_backward(at: int, total: int, what: str) -> None:
        if what.startswith("backward"):
            raise OSError("the rank broke")

    run_on_ranks(setup, DRAM, tmp_path, 3, work)

    assert isinstance(errors.pop(failing), OSError)
    assert len(errors) == 2
    for error in errors.values():
        assert isinstance(error, PeerLostError)
        assert error.rank == failing
        assert "the rank broke" in str(error)


def test_a_timeline_shows_what_ranks_do_together(tmp_path: Path) -> None:
    setup = Setup.of("llama", batch=5)
    first, second = setup.batches(2)

    def work(engine: Engine) -> list[tuple[str, str]]:
        engine.step(first)
        engine.step(second)
        ran = [event.operation for event in engine.timeline()]
        return [(op.lane, op.verb) for op in ran]

    for ran in run_on_ranks(setup, WAYS[2], tmp_path, 2, work):
        together = [verb for lane, verb in ran if lane == "ranks"]
        blocks = len(setup.model.blocks)
        assert together.count("exchange") == blocks
        assert together.count("gather") >= blocks
        assert together[-1] == "meet"


def test_a_plan_for_other_ranks_is_refused(tmp_path: Path) -> None:
    setup = Setup.of("llama", batch=9)
    shared = replace(setup, work=replace(setup.work, world=2))

    with pytest.raises(EngineError, match="the plan is for 2 ranks, but there are 1"):
        shared.engine(DRAM, tmp_path, ranks=SingleRank())
