"""Compiled decode layers give the same tokens, and are compiled once for any number of rows."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from penstock.generate import compiled_layers
from penstock.generate.compiled_layers import (
    CompiledDecodeLayers,
    UnfitLayersError,
    find_layers,
    make_shell,
)
from penstock.generate.forward import ResidentForward
from penstock.generate.generator import Generator
from penstock.generate.graphs import make_decoder
from penstock.kv.errors import KvWarning
from tests.equivalence.compiled import breaks, compile_by, graphs
from tests.kv.tiny_generators import random_prompts, reference_tokens, run, tiny_model
from tests.support.samples import sample

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 17, 30, 9, 12)
known: Any = transformers
CHOSEN = ("llama", "qwen3", "mistral", "gemma2", "gemma3")


def compiled_generator(model: Any, max_batch: int = 3, *, graphs: bool | None = True) -> Generator:
    return Generator(
        model, budget="64MiB", max_batch=max_batch, prefill_chunk=16, graphs=graphs, compiled=True
    )  # fmt: skip


def count_kinds(family: str) -> int:
    return 2 if family in ("gemma2", "gemma3") else 1


@pytest.mark.parametrize("family", sample(CHOSEN, ("gemma3",)))
def test_tokens_equal_those_of_a_dynamic_cache(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_by("aot_eager", monkeypatch)
    model, prompts = tiny_model(family), random_prompts(LENGTHS)
    expected = [reference_tokens(model, prompt, 20) for prompt in prompts]

    with compiled_generator(model) as generator:
        assert run(generator, prompts, 20) == expected

    # Once for one row, and once for any other number of rows.
    assert graphs() == 2 * count_kinds(family)
    assert breaks() == {}


def test_another_cache_or_more_rows_are_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by("eager", monkeypatch)
    model, prompts = tiny_model("llama"), random_prompts((9, 3, 21, 14, 30, 5, 11))
    expected = [reference_tokens(model, prompt, 12) for prompt in prompts]
    layers = CompiledDecodeLayers(model)
    monkeypatch.setattr(compiled_layers, "CompiledDecodeLayers", lambda _: layers)

    for most in (2, 5, 7):
        with compiled_generator(model, most) as generator:
            assert run(generator, prompts, 12) == expected

    assert graphs() == 2


def test_tokens_are_equal_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by("eager", monkeypatch)
    model, prompts = tiny_model("llama"), random_prompts(LENGTHS)
    expected = [reference_tokens(model, prompt, 8) for prompt in prompts]

    with compiled_generator(model, graphs=False) as generator:
        assert run(generator, prompts, 8) == expected

    assert graphs() == 2


@pytest.mark.long
def test_the_default_compiler_gives_the_same_tokens() -> None:
    """Inductor compiles C++ here for half a minute; the other tests trace the same graphs."""
    model, prompts = tiny_model("llama"), random_prompts((17, 9))
    expected = [reference_tokens(model, prompt, 12) for prompt in prompts]

    with compiled_generator(model) as generator:
        assert run(generator, prompts, 12) == expected


def test_the_model_is_unchanged_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by("eager", monkeypatch)
    model = tiny_model("llama")

    with compiled_generator(model) as generator:
        run(generator, random_prompts((9,)), 4)

        assert not any("forward" in vars(layer) for layer in find_layers(model))
        assert not any(each.is_meta for each in model.parameters())


def test_a_forward_replaced_later_is_restored() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    layers = CompiledDecodeLayers(model)
    layer = find_layers(model)[0]
    wrap(layer)
    original = layer.forward

    with layers.installed(None):
        assert layer.forward is not original

    assert layer.forward is original


def test_hooks_of_layers_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by("eager", monkeypatch)
    model = copy.deepcopy(tiny_model("llama"))
    find_layers(model)[1].register_forward_hook(lambda _module, _given, out: out + 0.5)
    prompts = random_prompts((17, 9))
    expected = [reference_tokens(model, prompt, 6) for prompt in prompts]

    with compiled_generator(model) as generator:
        assert run(generator, prompts, 6) == expected

    assert graphs() > 0


def hook(layer: torch.nn.Module) -> None:
    layer.get_submodule("mlp").register_forward_hook(lambda _module, _given, out: -out)


def wrap(layer: torch.nn.Module) -> None:
    """Replace a layer's forward, as `torch.compile` and libraries that patch models do."""
    original = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    vars(layer)["forward"] = forward


def lock(layer: torch.nn.Module) -> None:
    vars(layer)["lock"] = threading.Lock()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hook, "mlp of layer 1 has hooks"),
        (wrap, "LlamaDecoderLayer of layer 1 has a forward of its own"),
        (lock, "LlamaDecoderLayer cannot be copied"),
    ],
)
def test_layers_that_were_changed_are_not_compiled(
    change: Callable[[torch.nn.Module], None], reason: str
) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    expected_of, prompts = copy.deepcopy(model), random_prompts((17, 9))
    for each in (expected_of, model):
        change(find_layers(each)[1])
    if change is lock:  # a shell is a copy of the first layer of a kind
        change(find_layers(model)[0])
    changed = vars(find_layers(model)[1]).get("forward")
    expected = [reference_tokens(expected_of, prompt, 6) for prompt in prompts]

    with compiled_generator(model) as generator, pytest.warns(KvWarning, match=reason):
        assert run(generator, prompts, 6) == expected

    assert vars(find_layers(model)[1]).get("forward") is changed


def gpt2() -> Any:
    shape: dict[str, Any] = {
        "vocab_size": 260,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
    }
    chosen: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    return known.GPT2LMHeadModel(known.GPT2Config(**shape, **chosen))


def neox() -> Any:
    shape: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
    }
    chosen: dict[str, Any] = {"num_attention_heads": 4, "bos_token_id": None, "eos_token_id": None}
    return known.GPTNeoXForCausalLM(known.GPTNeoXConfig(**shape, **chosen))


@pytest.mark.parametrize("make", sample([gpt2, neox], [gpt2]))
def test_layers_get_the_cache_under_any_name_or_position(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_by("eager", monkeypatch)
    torch.manual_seed(0)
    model, prompts = make().eval(), random_prompts((17, 9))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(10 if weight.ndim == 2 else 1)
    expected = [reference_tokens(model, prompt, 6) for prompt in prompts]

    with compiled_generator(model) as generator:
        assert run(generator, prompts, 6) == expected

    assert graphs() == 2


def test_layers_that_share_keys_are_not_compiled() -> None:
    shape: dict[str, Any] = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 64}
    shape |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 8}
    own: dict[str, Any] = {"num_kv_shared_layers": 2, "laurel_rank": 8, "eos_token_id": None}
    own |= {"vocab_size_per_layer_input": 260, "hidden_size_per_layer_input": 8}
    own |= {"activation_sparsity_pattern": [0.0] * 4, "sliding_window": 12}
    model = known.Gemma3nForCausalLM(known.Gemma3nTextConfig(**shape, **own)).eval()
    prompt = random_prompts((17,))[0]

    with (
        compiled_generator(model) as generator,
        pytest.warns(KvWarning, match="share keys and values"),
    ):
        assert run(generator, [prompt], 4) == [reference_tokens(model, prompt, 4)]


def test_a_layer_that_is_in_the_list_twice_is_not_compiled() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    layers = find_layers(model)
    layers[1] = layers[0]

    with pytest.raises(UnfitLayersError, match="no list of"):
        CompiledDecodeLayers(model)


def test_shells_hold_no_weights() -> None:
    layer = find_layers(tiny_model("gemma3"))[0]

    shell = make_shell(layer)

    assert all(each.is_meta for each in shell.parameters())
    assert not any(each.is_meta for each in layer.parameters())


def test_a_model_that_cannot_be_compiled_continues_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch._dynamo.exc.Unsupported("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: refuse)
    model, prompts = tiny_model("llama"), random_prompts((17, 9))
    expected = [reference_tokens(model, prompt, 6) for prompt in prompts]

    with (
        compiled_generator(model) as generator,
        pytest.warns(KvWarning, match="cannot be compiled"),
    ):
        assert run(generator, prompts, 6) == expected


def test_a_model_without_a_list_of_layers_continues_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere(_model: Any) -> Any:
        raise LookupError("Odd has no list of 2 layers")

    monkeypatch.setattr(compiled_layers, "find_layers", nowhere)
    model, prompts = tiny_model("llama"), random_prompts((17,))

    with (
        compiled_generator(model) as generator,
        pytest.warns(KvWarning, match="no list of 2 layers"),
    ):
        assert run(generator, prompts, 6) == [reference_tokens(model, prompts[0], 6)]


def test_layers_without_a_decode_kernel_are_not_compiled_with_a_warning() -> None:
    keys = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 2, 4))
    cache = SimpleNamespace(views=SimpleNamespace(flat=[(keys, keys)]))

    with pytest.warns(KvWarning, match=r"heads of size 4 in torch.bfloat16.*not compiled"):
        assert make_decoder(tiny_model("llama"), cache, graphs=None, compiled=True) is None


def test_only_the_layers_of_the_decoder_are_found() -> None:
    text = tiny_model("llama")
    both = torch.nn.ModuleDict({"seen": copy.deepcopy(text.model.layers), "text": text})
    vars(both).update(config=text.config, get_decoder=lambda: text.model)

    assert find_layers(both) is text.model.layers


def test_moved_weights_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by("eager", monkeypatch)
    model, prompt = tiny_model("qwen2"), random_prompts((17,))[0]
    weight = find_layers(model)[1].get_parameter("mlp.down_proj.weight")
    was = weight.data
    with compiled_generator(model) as generator:
        before = run(generator, [prompt], 8)
        try:
            weight.data = -was
            changed = run(generator, [prompt], 8)
        finally:
            weight.data = was
        assert run(generator, [prompt], 8) == before != changed
        assert isinstance(generator.forward, ResidentForward)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_compiled_layers_on_a_gpu_give_the_tokens_of_the_cpu(family: str) -> None:
    prompts = random_prompts(LENGTHS)
    expected = [reference_tokens(tiny_model(family), prompt, 24) for prompt in prompts]
    model = copy.deepcopy(tiny_model(family)).to("cuda")

    with compiled_generator(model, max_batch=4, graphs=None) as generator:
        assert run(generator, prompts, 24) == expected

        assert isinstance(generator.forward, ResidentForward)
        decoder = generator.forward.decoder(generator.cache)
        assert decoder is not None
        assert decoder._recorder is not None
        assert decoder._compiled is not None
