"""Layers compiled for passes of one token: same tokens, and compiled once whatever the rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from penstock.kv import compiled
from penstock.kv.compiled import CompiledLayers, layers_of, shell_of
from penstock.kv.errors import KvWarning
from penstock.kv.generator import Generator
from penstock.kv.passes import Resident
from tests.equivalence.compiled import breaks, compile_by, graphs
from tests.kv.generating import alone, model_of, prompts_of, run

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 17, 30, 9, 12)
CHOSEN = ("llama", "qwen3", "mistral", "gemma2", "gemma3")


def compiling(model: Any, max_batch: int = 3, *, graphs: bool | None = True) -> Generator:
    return Generator(
        model, budget="64MiB", max_batch=max_batch, prefill_chunk=16, graphs=graphs, compiled=True
    )  # fmt: skip


def kinds(family: str) -> int:
    return 2 if family in ("gemma2", "gemma3") else 1


@pytest.mark.parametrize("family", CHOSEN)
def test_tokens_are_those_of_a_dynamic_cache_alone(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_by("aot_eager", monkeypatch)
    model, prompts = model_of(family), prompts_of(LENGTHS)
    expected = [alone(model, prompt, 20) for prompt in prompts]

    with compiling(model) as generator:
        assert run(generator, prompts, 20) == expected

    # Once for one row, once for any other number of them.
    assert graphs() == 2 * kinds(family)
    assert breaks() == {}


def test_another_cache_and_more_rows_need_no_more_code(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by("aot_eager", monkeypatch)
    model, prompts = model_of("llama"), prompts_of((9, 3, 21, 14, 30, 5, 11))
    expected = [alone(model, prompt, 12) for prompt in prompts]
    layers = CompiledLayers(model)
    monkeypatch.setattr(compiled, "CompiledLayers", lambda _: layers)

    for most in (2, 5, 7):
        with compiling(model, most) as generator:
            assert run(generator, prompts, 12) == expected

    assert graphs() == 2


def test_without_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by("aot_eager", monkeypatch)
    model, prompts = model_of("llama"), prompts_of(LENGTHS)
    expected = [alone(model, prompt, 8) for prompt in prompts]

    with compiling(model, graphs=False) as generator:
        assert run(generator, prompts, 8) == expected

    assert graphs() == 2


def test_code_of_the_usual_compiler_gives_the_same_tokens() -> None:
    model, prompts = model_of("llama"), prompts_of((17, 9))
    expected = [alone(model, prompt, 12) for prompt in prompts]

    with compiling(model) as generator:
        assert run(generator, prompts, 12) == expected


def test_the_model_is_as_before_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by("aot_eager", monkeypatch)
    model = model_of("llama")

    with compiling(model) as generator:
        run(generator, prompts_of((9,)), 4)

        assert not any("forward" in vars(layer) for layer in layers_of(model))
        assert not any(each.is_meta for each in model.parameters())


def test_a_forward_that_was_put_there_by_others_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_by("aot_eager", monkeypatch)
    model = model_of("llama")
    layer = layers_of(model)[0]
    theirs = layer.forward
    monkeypatch.setitem(vars(layer), "forward", theirs)

    with CompiledLayers(model).used():
        assert layer.forward != theirs

    assert layer.forward == theirs


def test_shells_hold_no_weights() -> None:
    layer = layers_of(model_of("gemma3"))[0]

    shell = shell_of(layer)

    assert all(each.is_meta for each in shell.parameters())
    assert not any(each.is_meta for each in layer.parameters())


def test_a_model_that_cannot_be_compiled_goes_on_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch._dynamo.exc.Unsupported("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: refuse)
    model, prompts = model_of("llama"), prompts_of((17, 9))
    expected = [alone(model, prompt, 6) for prompt in prompts]

    with compiling(model) as generator, pytest.warns(KvWarning, match="cannot be compiled"):
        assert run(generator, prompts, 6) == expected


def test_a_model_without_a_list_of_layers_goes_on_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere(_model: Any) -> Any:
        raise LookupError("Odd has no list of 2 layers")

    monkeypatch.setattr(compiled, "layers_of", nowhere)
    model, prompts = model_of("llama"), prompts_of((17,))

    with compiling(model) as generator, pytest.warns(KvWarning, match="no list of 2 layers"):
        assert run(generator, prompts, 6) == [alone(model, prompts[0], 6)]


def test_weights_that_moved_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by("aot_eager", monkeypatch)
    model, prompt = model_of("qwen2"), prompts_of((17,))[0]
    weight = layers_of(model)[1].get_parameter("mlp.down_proj.weight")
    was = weight.data
    with compiling(model) as generator:
        before = run(generator, [prompt], 8)
        try:
            weight.data = -was
            changed = run(generator, [prompt], 8)
        finally:
            weight.data = was
        assert run(generator, [prompt], 8) == before != changed
        assert isinstance(generator.forward, Resident)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # torch's tip, not wanted here
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_a_gpu_plays_compiled_layers_and_gives_the_tokens_of_the_cpu(family: str) -> None:
    prompts = prompts_of(LENGTHS)
    expected = [alone(model_of(family), prompt, 24) for prompt in prompts]
    model = copy.deepcopy(model_of(family)).to("cuda")

    with compiling(model, max_batch=4, graphs=None) as generator:
        assert run(generator, prompts, 24) == expected

        assert isinstance(generator.forward, Resident)
        decoder = generator.forward.decoder(generator.cache)
        assert decoder is not None
        assert decoder._recorder is not None
        assert decoder._compiled is not None
