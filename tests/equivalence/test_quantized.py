"""Training an adapter over quantized weights gives what plain torch gives with their values."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from penstock.engine.model_source import inspect_model
from penstock.model.quantize import quantized_values
from penstock.packed_weights import Quantization
from penstock.settings import Settings
from tests.equivalence.runs import WAYS, Way
from tests.equivalence.test_adapters import (
    MANY_WAYS,
    SOME_WAYS,
    assert_close,
    train,
    train_plainly,
    untrained,
)
from tests.support import engines
from tests.support.adapters import FUSED, adapted, lora, trained
from tests.support.samples import sample

CASES: dict[str, tuple[str, dict[str, Any], Quantization]] = {
    "llama": ("llama", {}, "nf4"),
    "gpt2 with Conv1D": ("gpt2", {"fan_in_fan_out": True}, "int4"),
    "qwen3, some modules": ("qwen3", {"target_modules": ["q_proj", "v_proj"]}, "int4"),
    "phi3, fused queries, keys and values": ("phi3", {"target_modules": FUSED["phi3"]}, "nf4"),
    "gemma3, one layer": (
        "gemma3", {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]}, "nf4"),
    "gpt_neox, with biases": (
        "gpt_neox", {"target_modules": FUSED["gpt_neox"], "bias": "all"}, "nf4"),
    "llama, DoRA": ("llama", {"use_dora": True}, "nf4"),
}  # fmt: skip
SAMPLE = ("llama", "gpt2 with Conv1D", "gemma3, one layer")


def quantized_names(model: Any, quantize: Quantization) -> list[str]:
    """Return the tensors that a run quantizes."""
    _, inventory = inspect_model(model, Settings())
    stored = engines.workload(quantize=quantize).stored(inventory)
    return [tensor.name for block in stored.blocks for tensor in block.quantized]


def use_quantized_values(model: Any, quantize: Quantization) -> None:
    """Round the weights that a run quantizes, in the type that they have."""
    parameters = dict(model.get_base_model().named_parameters())
    with torch.no_grad():
        for name in quantized_names(model, quantize):
            parameters[name].copy_(quantized_values(parameters[name], quantize))


@pytest.mark.parametrize("case", sample(CASES, ("gpt2 with Conv1D",)))
def test_20_steps_are_those_of_plain_torch_with_the_dequantized_weights(
    case: str, tmp_path: Path, one_thread: None
) -> None:
    family, fields, quantize = CASES[case]
    model = adapted(family, lora(**fields))
    plain = copy.deepcopy(model)
    use_quantized_values(plain, quantize)
    frozen = untrained(model)
    losses = train(model, WAYS[3], tmp_path, work={"quantize": quantize})
    assert losses == pytest.approx(train_plainly(plain), rel=1e-5)
    assert_close(trained(model), trained(plain))
    now = untrained(model)
    assert all(torch.equal(frozen[n], now[n]) for n in frozen), "the model has its own weights"


@pytest.mark.parametrize("case", sample(CASES, SAMPLE))
def test_linear_weights_of_layers_are_quantized_and_nothing_else(case: str) -> None:
    family, fields, quantize = CASES[case]
    model = adapted(family, lora(**fields)).get_base_model()
    linear = {
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and path != "lm_head" and "lora_" not in path
    }
    assert len(linear) >= 8
    assert set(quantized_names(model, quantize)) == linear - {"embed_out.weight"}


@pytest.mark.parametrize(
    ("case", "dtype", "ways"),
    [
        pytest.param("llama", "bf16", SOME_WAYS, id="llama, few"),
        *(
            pytest.param(case, dtype, MANY_WAYS, id=f"{case}, {dtype}", marks=pytest.mark.long)
            for case, dtype in (
                ("llama", "bf16"),
                ("gpt2 with Conv1D", "fp32"),
                ("gemma3, one layer", "bf16"),
                ("llama, DoRA", "fp16"),
            )
        ),
    ],
)
def test_plans_give_equal_bits(
    case: str, dtype: str, ways: tuple[Way, ...], tmp_path: Path
) -> None:
    family, fields, quantize = CASES[case]
    work = {"quantize": quantize, "dtype": dtype}
    found = []
    for way in ways:
        model = adapted(family, lora(**fields))
        losses = train(model, way, tmp_path, steps=3, work=work)
        found.append((losses, trained(model)))
    (first_losses, first), *others = found
    for losses, tensors in others:
        assert losses == first_losses
        assert all(torch.equal(tensors[name], first[name]) for name in first)
