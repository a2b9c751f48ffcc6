"""Compiled, wrapped, unsupported and shared models."""

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
from tests.kv.tiny_generators import random_prompts, reference_tokens, run, tiny_model
from tests.support.engines import plain_model, tiny_config

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (17, 9, 1)

GENERATED = ("olmoe", "qwen3_moe", "mixtral", "glm4_moe")
"""Families of mixtures of experts whose attention a generator supports."""

known: Any = transformers


def make_generator(model: Any, *, compiled: bool = False) -> Generator:
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
def test_a_compiled_model_runs_uncompiled(change: Callable[[Any], None]) -> None:
    model, prompts = copy.deepcopy(tiny_model("llama")), random_prompts(LENGTHS)
    expected = [reference_tokens(tiny_model("llama"), prompt, 6) for prompt in prompts]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    change(model)

    with make_generator(model) as generator:
        assert run(generator, prompts, 6) == expected
    with (
        make_generator(model, compiled=True) as generator,
        pytest.warns(KvWarning, match="it was compiled already"),
    ):
        assert run(generator, prompts, 6) == expected

    assert graphs() == 0


class Wrapped(torch.nn.Module):
    """A wrapper like those of PEFT and DistributedDataParallel."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module = model


@pytest.mark.parametrize(
    ("wrap", "path"), [(Wrapped, r"model\.module"), (torch.compile, r"model\._orig_mod")]
)
def test_a_wrapper_is_refused_with_the_path_of_the_model(
    wrap: Callable[[Any], Any], path: str
) -> None:
    model = wrap(tiny_model("llama"))

    with pytest.raises(UnfitModelError, match=f"wraps a LlamaForCausalLM; pass {path} instead"):
        make_generator(model)


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
    ("make", "reason"),
    [
        (llama4, "uses chunked_attention"),
        (qwen2_moe, "sliding windows only in its masks"),
        (bart, "does not take position_ids"),
    ],
)
def test_models_with_unsupported_attention_are_refused(
    make: Callable[[], Any], reason: str
) -> None:
    with pytest.raises(UnfitModelError, match=rf"{reason}.*use model.generate\(\)"):
        make_generator(make())


@pytest.mark.parametrize(
    "family", ["olmoe", *(pytest.param(f, marks=pytest.mark.long) for f in GENERATED[1:])]
)
def test_experts_generate_what_transformers_generates(family: str) -> None:
    model = plain_model(tiny_config(family, initializer_range=0.2), torch.float32).eval()
    prompts = random_prompts(LENGTHS)
    expected = [reference_tokens(model, prompt, 6) for prompt in prompts]

    with make_generator(model) as generator:
        assert run(generator, prompts, 6) == expected


def test_weights_on_several_devices_are_refused() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    model.model.layers[1].to("meta")

    with pytest.raises(UnfitModelError, match=r"weights on cpu and meta.*on one device"):
        make_generator(model)


def test_autocast_does_not_change_tokens() -> None:
    model, prompts = tiny_model("llama"), random_prompts(LENGTHS)
    expected = [reference_tokens(model, prompt, 6) for prompt in prompts]

    with torch.autocast("cpu", dtype=torch.bfloat16), make_generator(model) as generator:
        assert run(generator, prompts, 6) == expected


def test_a_compiled_model_can_generate_with_the_cache() -> None:
    model, (prompt,) = copy.deepcopy(tiny_model("llama")), random_prompts((17,))
    expected = reference_tokens(tiny_model("llama"), prompt, 6)
    whole(model)
    sizes: dict[str, Any] = {"max_batch": 1, "max_context": 64, "budget": "1MiB"}

    with VirtualCache(model.config, **sizes, device="cpu", dtype=torch.float32) as cache:
        actual = model.generate(
            torch.tensor([prompt]), past_key_values=cache, max_new_tokens=6, do_sample=False
        )

    assert actual[0, len(prompt) :].tolist() == expected


def test_training_modes_of_modules_are_restored() -> None:
    model = copy.deepcopy(tiny_model("llama")).train()
    model.model.layers[0].eval()
    before = [part.training for part in model.modules()]

    with make_generator(model) as generator:
        run(generator, random_prompts((9,)), 2)

    assert [part.training for part in model.modules()] == before


def test_two_generators_can_share_a_model_in_two_threads() -> None:
    model = copy.deepcopy(tiny_model("llama")).train()
    chosen, prompts = model.config._attn_implementation, random_prompts((17, 9, 30, 12))
    expected = [reference_tokens(tiny_model("llama"), prompt, 30) for prompt in prompts]

    def answer(_: int) -> list[list[int]]:
        with make_generator(model) as generator:
            return run(generator, prompts, 30)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(answer, range(4))) == [expected] * 4

    assert model.training
    assert model.config._attn_implementation == chosen
