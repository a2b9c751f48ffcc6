"""Decoding with fixed buffers.

On a CPU a pass is called again where a GPU replays a graph, so that everything but the recording is
tested here.
"""

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
from tests.kv.caches import (
    DIM,
    HEADS,
    LAYERS,
    bytes_after,
    close,
    grow,
    make_cache,
    random_tokens,
    read,
)
from tests.kv.fake_cuda_driver import DriverSpace
from tests.kv.tiny_generators import (
    random_prompts,
    reference_tokens,
    run,
    small_generator,
    tiny_model,
    tokens_by_request,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 17, 30, 9, 12)
CHOSEN = ("llama", "qwen3", "mistral", "gemma2", "gemma3")


def graph_generator(model: Any, max_batch: int = 3) -> Generator:
    return Generator(
        model, budget="64MiB", max_batch=max_batch, prefill_chunk=16, graphs=True
    )  # fmt: skip


def decoder_of(generator: Generator) -> Decoder:
    assert isinstance(generator.forward, ResidentForward)
    decoder = generator.forward.decoder(generator.cache)
    assert decoder is not None
    return decoder


# Tokens


@pytest.mark.parametrize("family", CHOSEN)
def test_tokens_equal_those_of_a_dynamic_cache(family: str) -> None:
    model, prompts = tiny_model(family), random_prompts(LENGTHS)
    expected = [reference_tokens(model, prompt, 20) for prompt in prompts]

    with graph_generator(model) as generator:
        assert run(generator, prompts, 20) == expected

        assert {rows for rows, _ in decoder_of(generator).recorded} >= {2, 4}


def test_requests_can_arrive_and_leave() -> None:
    model, prompts = tiny_model("mistral"), random_prompts((9, 3, 21, 14, 30, 5, 11))
    expected = [reference_tokens(model, prompt, 4 + 3 * at) for at, prompt in enumerate(prompts)]

    def arriving() -> Iterator[Request | None]:
        for at, prompt in enumerate(prompts):
            yield Request(prompt=prompt, max_new=4 + 3 * at)
            yield from [None] * 2

    with graph_generator(model, max_batch=5) as generator:
        actual = tokens_by_request(list(generator.run(arriving())))

    assert [actual[at] for at in range(len(prompts))] == expected


def test_preemption_does_not_change_tokens() -> None:
    model, prompts = tiny_model("gemma2"), random_prompts((20, 31, 8, 25))
    expected = [reference_tokens(model, prompt, 24) for prompt in prompts]

    with small_generator(model, tokens=110, max_batch=4, graphs=True) as generator:
        assert run(generator, prompts, 24) == expected

        assert generator.counts.preemptions > 0


def test_shared_prefixes_are_copied_before_they_are_written() -> None:
    model = tiny_model("qwen3")
    beginning, *ends = random_prompts((40, 3, 9, 6))
    prompts = [beginning + end for end in ends]
    expected = [reference_tokens(model, prompt, 12) for prompt in prompts]

    with graph_generator(model) as generator:
        assert run(generator, prompts, 12) == expected

        assert generator.counts.shared_tokens > 0


def test_a_cpu_has_no_decoder_by_default() -> None:
    model = tiny_model("llama")
    for choice in (None, False):
        with Generator(model, budget="64MiB", graphs=choice) as generator:
            assert isinstance(generator.forward, ResidentForward)
            assert generator.forward.decoder(generator.cache) is None
            assert default_chunks(generator.forward) == (512, 2048)


# Rows


def test_rows_are_padded_to_few_sizes() -> None:
    actual = [graphs.padded_rows(count) for count in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 100)]
    assert actual == [1, 2, 4, 4, 8, 8, 16, 16, 24, 32, 40, 104]


def draw_tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw new tokens of all layers; also return them as a model does: [layer, 2, rows, 1, ...]."""
    drawn = random_tokens(count)
    return drawn, drawn.view(torch.bfloat16).permute(1, 2, 0, 3, 4)[:, :, :, :, None]


def test_padding_rows_write_to_no_sequence(space: Space) -> None:
    cache = make_cache(space, slots=4)
    rows = [cache.admit() for _ in range(4)]
    for row, length in zip(rows, (21, 5, 40, 1), strict=True):
        grow(cache, row, random_tokens(length))
    before, behind = [read(cache, row) for row in rows], [bytes_after(cache, row) for row in rows]
    chosen = [rows[3], rows[0], rows[2]]  # neither adjacent nor in order
    cache.prepare([(row, 1) for row in chosen])
    batch = cache.make_decode_batch(8, 4096)
    drawn, given = draw_tokens(8)

    batch.fill(chosen, [7, 8, 9], [row.length for row in chosen])
    with cache.decoding(batch):
        for layer in range(LAYERS):
            keys, values = given[layer].to(cache.views.flat[0][0].device)
            cache.update(keys, values, layer)

    cache.advance([(row, 1) for row in chosen])
    each = LAYERS * 2 * HEADS * DIM * 2
    for row, held, rest in zip(rows, before, behind, strict=True):
        now = read(cache, row)
        assert torch.equal(now[: len(held)], held)
        if row in chosen:
            assert torch.equal(now[-1:], drawn[chosen.index(row)][None])
            rest = rest[each:]
        assert torch.equal(bytes_after(cache, row)[: len(rest)], rest)
    assert batch.tokens[:, 0].tolist() == [7, 8, 9, 0, 0, 0, 0, 0]
    assert batch.spans.ends.tolist() == [2, 22, 41, 0, 0, 0, 0, 0]
    cache.prepare([(rows[1], 1)])
    batch.fill([rows[1]], [6], [5])  # rows that were removed are not read again
    assert batch.spans.ends.tolist() == [6, 0, 0, 0, 0, 0, 0, 0]
    assert batch.positions[:, 0].tolist() == [5, 0, 0, 0, 0, 0, 0, 0]
    close(cache)


def test_rows_of_a_decode_batch_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a decode batch need not be adjacent, unlike those of other passes."""
    model, prompts = tiny_model("llama"), random_prompts((5, 11, 8))
    actual = []
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
                actual.append(generator.forward.forward(generator.cache, [one])[0])

    torch.testing.assert_close(actual[0], actual[1])


def test_the_scratch_page_is_released() -> None:
    space = DriverSpace()
    cache = make_cache(space)
    row = cache.admit()
    grow(cache, row, random_tokens(3))
    pages = len(space.driver.alive)
    cache.make_decode_batch(2, 4096)
    cache.make_decode_batch(4, 4096)

    assert len(space.driver.alive) == pages + 1  # shared by all batches
    stats = cache.stats
    held = stats.free + stats.live + stats.ahead + stats.kept + stats.others
    assert held == stats.pages_total
    close(cache)
    assert not space.driver.alive
    assert not space.driver.mapped
    assert not space.driver.ranges


def test_a_failed_scratch_page_leaves_nothing_allocated() -> None:
    space = DriverSpace()
    cache = make_cache(space)
    for call in ("cuMemCreate", "cuMemMap", "cuMemSetAccess"):
        space.driver.fail = lambda name, call=call: name == call  # type: ignore[misc]
        with pytest.raises(SpaceError, match=call):
            cache.make_decode_batch(2, 4096)
        assert not space.driver.alive
    space.driver.fail = lambda _: False
    cache.make_decode_batch(2, 4096)
    close(cache)
    assert not space.driver.alive


def test_a_decode_batch_refuses_rows_that_are_not_prepared() -> None:
    cache = make_cache()
    row = cache.admit()
    batch = cache.make_decode_batch(1, 64)
    with pytest.raises(BatchError, match="call prepare first"):
        batch.fill([row], [1], [0])
    with pytest.raises(BatchError, match="2 sequences do not fit a decode batch of 1"):
        batch.fill([row, row], [1, 1], [0, 0])
    with pytest.raises(BatchError, match="call prepare first"):
        batch.fill([Sequence()], [1], [0])
    close(cache)


def test_the_background_thread_pauses_during_a_recording() -> None:
    space = DriverSpace()
    cache = make_cache(space)
    row = cache.admit()
    mapped = threading.Event()
    space.driver.before = lambda call: mapped.set() if call == "cuMemMap" else None
    with cache.growth_paused():
        cache.prepare([(row, 1)])  # maps one page itself, and requests the next
        mapped.clear()
        assert not mapped.wait(0.2)

    assert mapped.wait(10)
    close(cache)


# Changed weights and failed recordings


class CountingRecorder:
    """A recorder without a GPU, which counts its calls."""

    def __init__(self) -> None:
        self.cache = self.forgotten = 0

    def record(self, call: Callable[[], torch.Tensor]) -> Any:
        call()
        self.cache += 1
        return graphs.RepeatedCall(call)

    def forget(self) -> None:
        self.forgotten += 1


def test_weights_written_in_place_are_used_and_moved_weights_recorded_again() -> None:
    model, prompts = copy.deepcopy(tiny_model("llama")), random_prompts((9, 4))
    head = model.lm_head.weight

    def expected_tokens() -> list[list[int]]:
        other = copy.deepcopy(model)
        return [reference_tokens(other, prompt, 6) for prompt in prompts]

    with graph_generator(model, max_batch=2) as generator:
        decoder, recorder = decoder_of(generator), CountingRecorder()
        decoder._recorder = recorder  # type: ignore[assignment]
        before = run(generator, prompts, 6)
        assert (before, recorder.cache) == (expected_tokens(), 1)

        with torch.no_grad():
            head.neg_()
        after = run(generator, prompts, 6)
        assert after != before
        assert (after, recorder.cache) == (expected_tokens(), 1)

        head.data = -head.data.clone()
        assert run(generator, prompts, 6) == before
        assert (recorder.forgotten, recorder.cache) == (1, 2)


def test_moved_and_replaced_weights_change_the_addresses() -> None:
    model = copy.deepcopy(tiny_model("qwen3"))
    changes: list[Callable[[], Any]] = [
        lambda: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.clone())),
        lambda: setattr(model.model.norm.weight, "data", model.model.norm.weight.data.clone()),
        lambda: setattr(model, "lm_head", copy.deepcopy(model.lm_head)),
        lambda: setattr(model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq * 2),
        lambda: model.model.layers[0].mlp.add_module("adapter", torch.nn.Linear(2, 2)),
        lambda: model.to(torch.float64),
    ]
    for change in changes:
        addresses = WeightAddresses(model)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5)
        assert not addresses.changed()
        change()
        assert addresses.changed()


def test_a_failed_recording_warns_once_and_generation_continues() -> None:
    model, prompts = tiny_model("gemma3"), random_prompts(LENGTHS)
    expected = [reference_tokens(model, prompt, 10) for prompt in prompts]

    class FailingRecorder:
        def record(self, call: Callable[[], torch.Tensor]) -> Any:
            call()
            raise RuntimeError("its forward pass waits for the GPU\nand more")

    with graph_generator(model) as generator:
        decoder_of(generator)._recorder = FailingRecorder()  # type: ignore[assignment]
        with pytest.warns(KvWarning, match=r"Gemma3\w+ cannot be recorded.* waits for the GPU$"):
            actual = run(generator, prompts[:2], 10)
        assert actual == expected[:2]

        assert run(generator, prompts, 10) == expected  # a second warning would fail the test
        assert {rows for rows, _ in decoder_of(generator).recorded} >= {3}  # not padded


def test_a_warning_names_an_error_without_a_message() -> None:
    class FailingRecorder:
        def record(self, _call: Callable[[], torch.Tensor]) -> Any:
            raise RuntimeError

    with graph_generator(tiny_model("llama")) as generator:
        decoder_of(generator)._recorder = FailingRecorder()  # type: ignore[assignment]
        with pytest.warns(KvWarning, match="cannot be recorded.*: RuntimeError$"):
            run(generator, random_prompts((4,)), 3)


def test_a_closed_generator_holds_no_recordings() -> None:
    generator = graph_generator(tiny_model("llama"))
    run(generator, random_prompts((4,)), 3)
    decoder = decoder_of(generator)
    generator.close()

    assert not decoder.recorded
    assert isinstance(generator.forward, ResidentForward)
    assert generator.forward._decoder == (None, None)
