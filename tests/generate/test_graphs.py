"""Passes of one token with fixed buffers: on a CPU they are called again where a GPU plays what was
recorded, so that everything but the recording is tested here."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from penstock.generate import graphs
from penstock.generate.forward import ForwardPass, ResidentForward, default_chunks
from penstock.generate.generator import Generator
from penstock.generate.graphs import Decoder, WeightAddresses
from penstock.generate.requests import Request
from penstock.kv import cache as cache_module
from penstock.kv.address_space import Space
from penstock.kv.errors import BatchError, KvWarning, SpaceError
from penstock.kv.slots import Sequence
from tests.kv.caches import DIM, HEADS, LAYERS, cache, close, grow, read, some, tail
from tests.kv.driver import DriverSpace
from tests.kv.generating import alone, gathered, model_of, prompts_of, run, small_generator

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 17, 30, 9, 12)
CHOSEN = ("llama", "qwen3", "mistral", "gemma2", "gemma3")


def graphed(model: Any, max_batch: int = 3) -> Generator:
    return Generator(
        model, budget="64MiB", max_batch=max_batch, prefill_chunk=16, graphs=True
    )  # fmt: skip


def decoder_of(generator: Generator) -> Decoder:
    assert isinstance(generator.forward, ResidentForward)
    found = generator.forward.decoder(generator.cache)
    assert found is not None
    return found


# Tokens.


@pytest.mark.parametrize("family", CHOSEN)
def test_tokens_are_those_of_a_dynamic_cache_alone(family: str) -> None:
    model, prompts = model_of(family), prompts_of(LENGTHS)
    expected = [alone(model, prompt, 20) for prompt in prompts]

    with graphed(model) as generator:
        assert run(generator, prompts, 20) == expected

        assert {rows for rows, _ in decoder_of(generator).recorded} >= {2, 4}


def test_requests_may_come_and_go() -> None:
    model, prompts = model_of("mistral"), prompts_of((9, 3, 21, 14, 30, 5, 11))
    expected = [alone(model, prompt, 4 + 3 * at) for at, prompt in enumerate(prompts)]

    def over_time() -> Iterator[Request | None]:
        for at, prompt in enumerate(prompts):
            yield Request(prompt=prompt, max_new=4 + 3 * at)
            yield from [None] * 2

    with graphed(model, max_batch=5) as generator:
        found = gathered(list(generator.run(over_time())))

    assert [found[at] for at in range(len(prompts))] == expected


def test_a_dry_pool_preempts_and_tokens_stay_the_same() -> None:
    model, prompts = model_of("gemma2"), prompts_of((20, 31, 8, 25))
    expected = [alone(model, prompt, 24) for prompt in prompts]

    with small_generator(model, tokens=110, max_batch=4, graphs=True) as generator:
        assert run(generator, prompts, 24) == expected

        assert generator.counts.preemptions > 0


def test_shared_beginnings_are_copied_before_they_are_written() -> None:
    model = model_of("qwen3")
    beginning, *ends = prompts_of((40, 3, 9, 6))
    prompts = [beginning + end for end in ends]
    expected = [alone(model, prompt, 12) for prompt in prompts]

    with graphed(model) as generator:
        assert run(generator, prompts, 12) == expected

        assert generator.counts.shared_tokens > 0


def test_without_being_asked_a_cpu_makes_no_use_of_it() -> None:
    model = model_of("llama")
    for choice in (None, False):
        with Generator(model, budget="64MiB", graphs=choice) as generator:
            assert isinstance(generator.forward, ResidentForward)
            assert generator.forward.decoder(generator.cache) is None
            assert default_chunks(generator.forward) == (512, 2048)


# Rows.


def test_rows_are_padded_in_few_steps() -> None:
    found = [graphs.padded_rows(count) for count in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 100)]
    assert found == [1, 2, 4, 4, 8, 8, 16, 16, 24, 32, 40, 104]


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens of all layers, and the same as the model gives them: [layer, 2, rows, 1, ...]."""
    drawn = some(count)
    return drawn, drawn.view(torch.bfloat16).permute(1, 2, 0, 3, 4)[:, :, :, :, None]


def test_padding_writes_into_nobodys_pages(space: Space) -> None:
    made = cache(space, slots=4)
    rows = [made.admit() for _ in range(4)]
    for row, length in zip(rows, (21, 5, 40, 1), strict=True):
        grow(made, row, some(length))
    before, behind = [read(made, row) for row in rows], [tail(made, row) for row in rows]
    chosen = [rows[3], rows[0], rows[2]]  # neither neighbours nor in order
    made.prepare([(row, 1) for row in chosen])
    batch = made.make_decode_batch(8, 4096)
    drawn, given = tokens(8)

    batch.fill(chosen, [7, 8, 9], [row.length for row in chosen])
    with made.decoding(batch):
        for layer in range(LAYERS):
            keys, values = given[layer].to(made.views.flat[0][0].device)
            made.update(keys, values, layer)

    made.advance([(row, 1) for row in chosen])
    each = LAYERS * 2 * HEADS * DIM * 2
    for row, held, rest in zip(rows, before, behind, strict=True):
        now = read(made, row)
        assert torch.equal(now[: len(held)], held)
        if row in chosen:
            assert torch.equal(now[-1:], drawn[chosen.index(row)][None])
            rest = rest[each:]
        assert torch.equal(tail(made, row)[: len(rest)], rest)
    assert batch.tokens[:, 0].tolist() == [7, 8, 9, 0, 0, 0, 0, 0]
    assert batch.spans.ends.tolist() == [2, 22, 41, 0, 0, 0, 0, 0]
    made.prepare([(rows[1], 1)])
    batch.fill([rows[1]], [6], [5])  # those who have left are not read again
    assert batch.spans.ends.tolist() == [6, 0, 0, 0, 0, 0, 0, 0]
    assert batch.positions[:, 0].tolist() == [5, 0, 0, 0, 0, 0, 0, 0]
    close(made)


def test_rows_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need not be neighbours, as they must be for other passes."""
    model, prompts = model_of("llama"), prompts_of((5, 11, 8))
    found = []
    for choice in (False, True):
        with Generator(model, budget="64MiB", max_batch=3, graphs=choice) as generator:
            rows = [generator.cache.admit() for _ in prompts]
            new = [(row, len(prompt) + 1) for row, prompt in zip(rows, prompts, strict=True)]
            generator.cache.prepare(new)
            for row, prompt in zip(rows, prompts, strict=True):
                generator.forward.forward(generator.cache, [ForwardPass([row], [prompt], [0])])
            generator.cache.advance([(row, count - 1) for row, count in new])
            generator.cache.prepare([(row, 1) for row in rows])
            one = ForwardPass([rows[2], rows[0]], [[9], [4]], [8, 5])
            with monkeypatch.context() as patched:
                if choice:
                    patched.delattr(cache_module, "make_adjacent")
                found.append(generator.forward.forward(generator.cache, [one])[0])

    torch.testing.assert_close(found[0], found[1])


def test_the_place_for_padding_goes_back() -> None:
    space = DriverSpace()
    made = cache(space)
    row = made.admit()
    grow(made, row, some(3))
    pages = len(space.driver.alive)
    made.make_decode_batch(2, 4096)
    made.make_decode_batch(4, 4096)

    assert len(space.driver.alive) == pages + 1  # one for all
    stats = made.stats
    held = stats.free + stats.live + stats.ahead + stats.kept + stats.others
    assert held == stats.pages_total
    close(made)
    assert not space.driver.alive
    assert not space.driver.mapped
    assert not space.driver.ranges


def test_a_place_for_padding_that_cannot_be_had_is_not_half_there() -> None:
    space = DriverSpace()
    made = cache(space)
    for call in ("cuMemCreate", "cuMemMap", "cuMemSetAccess"):
        space.driver.fail = lambda name, call=call: name == call  # type: ignore[misc]
        with pytest.raises(SpaceError, match=call):
            made.make_decode_batch(2, 4096)
        assert not space.driver.alive
    space.driver.fail = lambda _: False
    made.make_decode_batch(2, 4096)
    close(made)
    assert not space.driver.alive


def test_a_slate_refuses_rows_without_room() -> None:
    made = cache()
    row = made.admit()
    batch = made.make_decode_batch(1, 64)
    with pytest.raises(BatchError, match="call prepare first"):
        batch.fill([row], [1], [0])
    with pytest.raises(BatchError, match="2 sequences do not fit a decode batch of 1"):
        batch.fill([row, row], [1, 1], [0, 0])
    with pytest.raises(BatchError, match="call prepare first"):
        batch.fill([Sequence()], [1], [0])
    close(made)


def test_the_background_thread_waits_while_something_is_recorded() -> None:
    space = DriverSpace()
    made = cache(space)
    row = made.admit()
    mapped = threading.Event()
    space.driver.before = lambda call: mapped.set() if call == "cuMemMap" else None
    with made.growth_paused():
        made.prepare([(row, 1)])  # maps one page itself, and wishes for the next
        mapped.clear()
        assert not mapped.wait(0.2)

    assert mapped.wait(10)
    close(made)


# Weights, and what cannot be recorded.


class Stand:
    """A recorder without a GPU."""

    def __init__(self) -> None:
        self.made = self.forgotten = 0

    def record(self, call: Callable[[], torch.Tensor]) -> Any:
        call()
        self.made += 1
        return graphs.RepeatedCall(call)

    def forget(self) -> None:
        self.forgotten += 1


def test_weights_written_in_place_are_used_and_weights_moved_are_recorded_anew() -> None:
    model, prompts = copy.deepcopy(model_of("llama")), prompts_of((9, 4))
    head = model.lm_head.weight

    def negated() -> list[list[int]]:
        other = copy.deepcopy(model)
        return [alone(other, prompt, 6) for prompt in prompts]

    with graphed(model, max_batch=2) as generator:
        decoder, stand = decoder_of(generator), Stand()
        decoder._recorder = stand  # type: ignore[assignment]
        before = run(generator, prompts, 6)
        assert (before, stand.made) == (negated(), 1)

        with torch.no_grad():
            head.neg_()
        after = run(generator, prompts, 6)
        assert after != before
        assert (after, stand.made) == (negated(), 1)

        head.data = -head.data.clone()
        assert run(generator, prompts, 6) == before
        assert (stand.forgotten, stand.made) == (1, 2)


def test_what_counts_as_another_place() -> None:
    model = copy.deepcopy(model_of("qwen3"))
    changes: list[Callable[[], Any]] = [
        lambda: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.clone())),
        lambda: setattr(model.model.norm.weight, "data", model.model.norm.weight.data.clone()),
        lambda: setattr(model, "lm_head", copy.deepcopy(model.lm_head)),
        lambda: setattr(model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq * 2),
        lambda: model.model.layers[0].mlp.add_module("adapter", torch.nn.Linear(2, 2)),
        lambda: model.to(torch.float64),
    ]
    for change in changes:
        known = WeightAddresses(model)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5)
        assert not known.changed()
        change()
        assert known.changed()


def test_what_cannot_be_recorded_goes_on_and_is_said_once() -> None:
    model, prompts = model_of("gemma3"), prompts_of(LENGTHS)
    expected = [alone(model, prompt, 10) for prompt in prompts]

    class Broken:
        def record(self, call: Callable[[], torch.Tensor]) -> Any:
            call()
            raise RuntimeError("its forward pass waits for the GPU\nand more")

    with graphed(model) as generator:
        decoder_of(generator)._recorder = Broken()  # type: ignore[assignment]
        with pytest.warns(KvWarning, match=r"Gemma3\w+ cannot be recorded.* waits for the GPU$"):
            found = run(generator, prompts[:2], 10)
        assert found == expected[:2]

        assert run(generator, prompts, 10) == expected  # a second warning would be an error
        assert {rows for rows, _ in decoder_of(generator).recorded} >= {3}  # nor padded


def test_an_error_that_says_nothing_is_called_by_its_name() -> None:
    class Broken:
        def record(self, _call: Callable[[], torch.Tensor]) -> Any:
            raise RuntimeError

    with graphed(model_of("llama")) as generator:
        decoder_of(generator)._recorder = Broken()  # type: ignore[assignment]
        with pytest.warns(KvWarning, match="cannot be recorded.*: RuntimeError$"):
            run(generator, prompts_of((4,)), 3)


def test_a_generator_that_is_closed_holds_nothing() -> None:
    generator = graphed(model_of("llama"))
    run(generator, prompts_of((4,)), 3)
    decoder = decoder_of(generator)
    generator.close()

    assert not decoder.recorded
    assert isinstance(generator.forward, ResidentForward)
    assert generator.forward._decoder == (None, None)
