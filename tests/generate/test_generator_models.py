"""Models that others have changed, or use at the same time: same tokens, and left as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers

from penstock.generate.generator import Generator
from penstock.generate.requests import UnfitModelError
from penstock.kv.cache import VirtualCache
from penstock.kv.errors import KvWarning
from tests.equivalence.compiled import graphs
from tests.kv.generating import alone, model_of, prompts_of, run

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (17, 9, 1)

known: Any = transformers


def generating(model: Any, *, compiled: bool = False) -> Generator:
    return Generator(
        model, budget="64MiB", max_batch=3, prefill_chunk=16, graphs=True, compiled=compiled
    )


def whole(model: Any) -> None:
    model.compile(backend="aot_eager")


def forward(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="aot_eager")


def layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")


@pytest.mark.parametrize("change", [whole, forward, layers])
def test_a_model_that_was_compiled_runs_as_it_was_written(change: Callable[[Any], None]) -> None:
    model, prompts = copy.deepcopy(model_of("llama")), prompts_of(LENGTHS)
    expected = [alone(model_of("llama"), prompt, 6) for prompt in prompts]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    change(model)

    with generating(model) as generator:
        assert run(generator, prompts, 6) == expected
    with (
        generating(model, compiled=True) as generator,
        pytest.warns(KvWarning, match="it was compiled already"),
    ):
        assert run(generator, prompts, 6) == expected

    assert graphs() == 0


class Wrapped(torch.nn.Module):
    """As those of PEFT and of several GPUs are."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module = model


@pytest.mark.parametrize(
    ("wrap", "where"), [(Wrapped, r"model\.module"), (torch.compile, r"model\._orig_mod")]
)
def test_a_model_in_a_wrapper_is_asked_for(wrap: Callable[[Any], Any], where: str) -> None:
    model = wrap(model_of("llama"))

    with pytest.raises(UnfitModelError, match=f"wraps a LlamaForCausalLM; pass {where} instead"):
        generating(model)


SHAPE: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "pad_token_id": 0,
}  # fmt: skip


def llama4() -> Any:
    own = {"num_local_experts": 2, "head_dim": 8, "attention_chunk_size": 8}
    return known.Llama4ForCausalLM(known.Llama4TextConfig(**SHAPE, **own))


def qwen2_moe() -> Any:
    own: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8}
    own |= {"layer_types": ["full_attention", "sliding_attention"]}
    small = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    return known.Qwen2MoeForCausalLM(known.Qwen2MoeConfig(**SHAPE, **own, **small))


def bart() -> Any:
    own = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "is_decoder": True}
    config = known.BartConfig(vocab_size=260, **own, is_encoder_decoder=False)
    return known.BartForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (llama4, "uses chunked_attention"),
        (qwen2_moe, "sliding windows only in its masks"),
        (bart, "does not take position_ids"),
    ],
)
def test_models_whose_tokens_would_be_others_are_refused(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(UnfitModelError, match=rf"{why}.*use model.generate\(\)"):
        generating(make())


def test_weights_that_are_elsewhere_are_refused() -> None:
    model = copy.deepcopy(model_of("llama"))
    model.model.layers[1].to("meta")

    with pytest.raises(UnfitModelError, match=r"weights on cpu and meta.*on one device"):
        generating(model)


def test_what_lies_around_a_generator_does_not_change_its_numbers() -> None:
    model, prompts = model_of("llama"), prompts_of(LENGTHS)
    expected = [alone(model, prompt, 6) for prompt in prompts]

    with torch.autocast("cpu", dtype=torch.bfloat16), generating(model) as generator:
        assert run(generator, prompts, 6) == expected


def test_a_model_that_was_compiled_generates_with_the_cache() -> None:
    model, (prompt,) = copy.deepcopy(model_of("llama")), prompts_of((17,))
    expected = alone(model_of("llama"), prompt, 6)
    whole(model)
    room: dict[str, Any] = {"max_batch": 1, "max_context": 64, "budget": "1MiB"}

    with VirtualCache(model.config, **room, device="cpu", dtype=torch.float32) as cache:
        found = model.generate(
            torch.tensor([prompt]), past_key_values=cache, max_new_tokens=6, do_sample=False
        )

    assert found[0, len(prompt) :].tolist() == expected


def test_parts_that_rest_in_training_still_rest() -> None:
    model = copy.deepcopy(model_of("llama")).train()
    model.model.layers[0].eval()
    before = [part.training for part in model.modules()]

    with generating(model) as generator:
        run(generator, prompts_of((9,)), 2)

    assert [part.training for part in model.modules()] == before


def test_two_generators_of_one_model_in_two_threads() -> None:
    model = copy.deepcopy(model_of("llama")).train()
    chosen, prompts = model.config._attn_implementation, prompts_of((17, 9, 30, 12))
    expected = [alone(model_of("llama"), prompt, 30) for prompt in prompts]

    def answer(_: int) -> list[list[int]]:
        with generating(model) as generator:
            return run(generator, prompts, 30)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(answer, range(4))) == [expected] * 4

    assert model.training
    assert model.config._attn_implementation == chosen
