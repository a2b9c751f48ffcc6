"""Decoding on a GPU: the kernel with real shapes, and tokens with and without CUDA graphs."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from penstock.generate.forward import ForwardPass, ResidentForward
from penstock.generate.generator import Generator
from penstock.generate.graphs import Decoder, refusing_synchronization
from penstock.generate.requests import Request
from penstock.kv import VirtualCache, decode_attention
from penstock.kv.errors import KvWarning
from tests.kv.decode_cases import make_case
from tests.kv.tiny_generators import (
    FAMILIES,
    random_prompts,
    reference_tokens,
    run,
    tiny_model,
    tokens_by_request,
)
from tests.support.gpu_memory import OwnMemory, PageCounter, counted_pages

pytestmark = pytest.mark.gpu

LENGTHS = (1, 5, 17, 30, 9, 41)


def on_gpu(family: str, dtype: torch.dtype) -> Any:
    return copy.deepcopy(tiny_model(family)).to("cuda", dtype)


def decoder_of(generator: Generator) -> Decoder:
    assert isinstance(generator.forward, ResidentForward)
    decoder = generator.forward.decoder(generator.cache)
    assert decoder is not None
    return decoder


# The kernel

SHAPES = {
    "llama-8b": {"heads": 32, "shared": 8, "head": 128},
    "qwen2-7b": {"heads": 28, "shared": 4, "head": 128},
    "gemma2-9b": {"heads": 16, "shared": 8, "head": 256},
    "phi-like": {"heads": 32, "shared": 32, "head": 96},
    "small": {"heads": 8, "shared": 1, "head": 64},
    "tiny": {"heads": 4, "shared": 2, "head": 8},
    "odd": {"heads": 10, "shared": 2, "head": 80},
}
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 2.5e-3, torch.float32: 1e-5}
"""Weights and results, up to 5, are rounded to 8, 11 or 24 bits: an error of one unit in the last
place. In fp32, sums of thousands of terms reach it."""


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1000, None), (None, 5.0)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_gives_exact_attention(
    shape: str, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    lengths = [1, 0, 63, 64, 65, 1500, 4097]
    case = make_case(lengths, **SHAPES[shape], dtype=dtype, device="cuda")
    actual = case.attend(window=window, softcap=softcap).cpu().double()

    error = (actual - case.exact(window=window, softcap=softcap)).abs().max()
    assert float(error) < TOLERANCES[dtype]


def test_one_long_row_is_split_and_joined() -> None:
    case = make_case([70_001], **SHAPES["llama-8b"], dtype=torch.bfloat16, device="cuda")
    error = (case.attend().cpu().double() - case.exact()).abs().max()
    assert float(error) < TOLERANCES[torch.bfloat16]


def test_the_same_rows_give_the_same_bits() -> None:
    case = make_case([3000, 17, 900], **SHAPES["llama-8b"], dtype=torch.bfloat16, device="cuda")
    first = case.attend()
    assert all(torch.equal(case.attend(), first) for _ in range(5))


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_the_kernel_stays_inside_pages_that_just_fit(over: int) -> None:
    """In an 8B model's layout a 2 MiB page holds 16 tokens, and nothing is mapped after the last.

    Reading beyond it would be an illegal access.
    """
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8
    )
    with VirtualCache(
        config, max_batch=3, max_context=8192, budget="1GiB", device="cuda", dtype=torch.bfloat16
    ) as cache:
        rows = [cache.admit() for _ in range(3)]
        lengths = [16 * 40 + over, 16 + over, 16 * 100 + over]
        cache.prepare(list(zip(rows, lengths, strict=True)))
        with cache.growth_paused():
            slots = [cache._table.slot_of(row) for row in rows]
            for slot, length in zip(slots, lengths, strict=True):
                fit = cache._table.layout.pages_for(length)
                cache._table.pool.release(cache._table.page_table.truncate(slot, fit))
            _read_all_layers(cache, [slot.index for slot in slots], lengths)
            torch.cuda.synchronize()


def _read_all_layers(cache: VirtualCache, slots: list[int], lengths: list[int]) -> None:
    per_row = cache._table.layout.row_tokens
    query = torch.randn(3, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([slot * per_row for slot in slots], device="cuda")
    spans = decode_attention.RowSpans(starts, torch.tensor(lengths, device="cuda"), 8192)
    for keys, values in cache.views.rows:
        actual = decode_attention.attend(query, keys, values, spans, None, None, None)
        assert actual.isfinite().all()


# Graphs


@pytest.mark.parametrize("graphs", [None, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_tokens_equal_those_of_the_cpu(family: str, graphs: bool | None) -> None:
    prompts = random_prompts(LENGTHS)
    expected = [reference_tokens(tiny_model(family), prompt, 24) for prompt in prompts]
    model = on_gpu(family, torch.float32)
    with Generator(
        model, budget="64MiB", max_batch=4, prefill_chunk=16, graphs=graphs
    ) as generator:
        assert run(generator, prompts, 24) == expected

        decoder = decoder_of(generator)
        assert decoder.recorded
        assert (decoder._recorder is not None) == (graphs is None)


def arriving(seed: int, count: int) -> Iterator[Request | None]:
    """Yield requests over time, with few different beginnings so that many are shared."""
    drawn = random.Random(seed)
    beginnings = random_prompts((40, 0, 0), seed)
    for at in range(count):
        own = [drawn.randrange(3, 260) for _ in range(drawn.randrange(1, 50))]
        yield Request(
            prompt=drawn.choice(beginnings) + own, max_new=drawn.randrange(1, 40), id=at
        )  # fmt: skip
        yield from [None] * drawn.randrange(3)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_200_arriving_requests_get_equal_tokens_with_and_without_graphs(family: str) -> None:
    model = on_gpu(family, torch.float32)
    answers = []
    for graphs in (None, False):
        with Generator(
            model, budget="24MiB", max_batch=10, max_context=128, prefill_chunk=48, graphs=graphs
        ) as generator:
            answers.append(tokens_by_request(list(generator.run(arriving(5, 200)))))
            used = decoder_of(generator).recorded
            assert len({rows for rows, _ in used}) > 2

    assert len(answers[0]) == 200
    assert answers[0] == answers[1]


def test_moved_weights_are_recorded_again() -> None:
    model, prompts = on_gpu("llama", torch.float32), random_prompts((9, 4))
    expected = [reference_tokens(tiny_model("llama"), prompt, 8) for prompt in prompts]
    with Generator(model, budget="64MiB", max_batch=2, prefill_chunk=16) as generator:
        assert run(generator, prompts, 8) == expected
        for parameter in model.parameters():
            moved = parameter.data.clone()
            parameter.data.fill_(float("nan"))  # a read of the old address would show
            parameter.data = moved
        assert run(generator, prompts, 8) == expected

        with torch.no_grad():
            model.lm_head.weight.neg_()  # in place: no new recording is needed
        other = run(generator, prompts, 8)
        assert other != expected
        with torch.no_grad():
            model.lm_head.weight.neg_()
        assert run(generator, prompts, 8) == expected


def test_a_model_that_waits_for_the_gpu_continues_without_graphs() -> None:
    model, prompts = on_gpu("llama", torch.float32), random_prompts((9, 4))
    expected = [reference_tokens(tiny_model("llama"), prompt, 8) for prompt in prompts]

    def waits(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        assert output.sum().item() == output.sum().item()

    model.model.norm.register_forward_hook(waits)
    with (
        Generator(model, budget="64MiB", max_batch=2, prefill_chunk=16) as generator,
        pytest.warns(KvWarning, match="waits for the GPU"),
    ):
        assert run(generator, prompts, 8) == expected
    assert torch.randn(3, device="cuda").isfinite().all()  # torch's own state is intact


def test_a_wait_of_this_thread_is_refused() -> None:
    here = torch.ones(3, device="cuda")
    with refusing_synchronization():
        here.add_(1)
    with pytest.raises(RuntimeError, match="waits for the GPU"), refusing_synchronization():
        here.sum().item()


def test_close_returns_all_memory_to_the_driver() -> None:
    model, prompts = on_gpu("llama", torch.bfloat16), random_prompts(LENGTHS)

    def once(pages: PageCounter) -> OwnMemory:
        with Generator(model, budget="64MiB", max_batch=6, prefill_chunk=16) as generator:
            run(generator, prompts, 12)
            assert decoder_of(generator)._recorder is not None
            assert pages.nbytes > 0
        return pages.measure()

    with counted_pages() as pages:
        once(pages)  # libraries keep what they allocate the first time
        before = once(pages)
        assert [once(pages) for _ in range(3)] == [before] * 3
        assert pages.nbytes == 0


def test_pages_are_mapped_ahead_while_graphs_are_recorded_and_replayed() -> None:
    """Rows grow over many pages, which the background thread maps."""
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=256, num_attention_heads=8, num_key_value_heads=8,
        head_dim=128, intermediate_size=256, vocab_size=260, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(1)
    make: Any = transformers.LlamaForCausalLM
    model = make(config).to("cuda", torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    with Generator(model, budget="256MiB", max_batch=4, max_context=4096) as generator:
        generator._stop_tokens = frozenset()
        run(generator, random_prompts((900, 3, 500)), 1200)
        assert generator.cache.stats.grown_ahead > 0
        one = ForwardPass([generator.cache.admit()], [[5]], [0])
        generator.cache.prepare([(one.sequences[0], 1)])
        assert generator.forward.forward(generator.cache, [one])[0].isfinite().all()
