"""Adapters of experts are trained as PEFT trains them, under any plan, without a full product."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import penstock
from penstock.engine.model_source import inspect_model
from penstock.errors import SettingsError
from penstock.model.experts import _adapt
from penstock.model.parameter_adapters import replace_parametrizations
from penstock.model.split import SplitModel
from penstock.settings import Settings
from penstock.train.merge import merge
from tests.equivalence.runs import DISK, DRAM, RESIDENT, WAYS
from tests.equivalence.test_adapters import (
    IN_HBM,
    MIXED,
    ON_DISK,
    SOME_KEPT,
    assert_close,
    train,
    train_plainly,
)
from tests.support import engines
from tests.support.adapters import adapted, lora, trained

# PEFT warns about patterns for the ranks of experts that it has written itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*_pattern keys did not match.*gate_up_proj")

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ROUTER = {"target_modules": ["o_proj"], "target_parameters": [*EXPERTS, "gate.weight"]}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "olmoe, all linear layers, experts and router": ("olmoe", {}, {}),
    "qwen3_moe, in tiles": ("qwen3_moe", {}, {"mlp_tile": 5}),
    "gpt_oss, transposed": ("gpt_oss", {"target_modules": [], "target_parameters": EXPERTS}, {}),
    "gpt_oss, with the biases of experts": (
        "gpt_oss", {"target_modules": [], "target_parameters": [*EXPERTS, "gate_up_proj_bias"]},
        {}),
    "mixtral, by root of rank": ("mixtral", {"use_rslora": True}, {}),
    "deepseek_v3, dense and shared": ("deepseek_v3", ROUTER, {}),
    "glm4_moe, only down": ("glm4_moe", {"target_parameters": EXPERTS[1:]}, {}),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [case if case.startswith("olmoe") else pytest.param(case, marks=pytest.mark.long)
     for case in CASES],
)  # fmt: skip
def test_20_steps_are_those_of_peft_in_plain_torch(
    case: str, tmp_path: Path, one_thread: None
) -> None:
    family, fields, work = CASES[case]
    model = adapted(family, lora(**fields))
    plain, before = copy.deepcopy(model), trained(model)
    assert any(".experts." in name for name in before)

    losses, expected = train(model, WAYS[3], tmp_path, work=work), train_plainly(plain)

    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close(trained(model), trained(plain))
    assert not any(torch.equal(tensor, before[name]) for name, tensor in trained(model).items())


MANY = (RESIDENT, DRAM, DISK, WAYS[8], IN_HBM, ON_DISK, MIXED, SOME_KEPT)


@pytest.mark.parametrize(
    ("family", "ways"),
    [
        pytest.param("olmoe", (RESIDENT, ON_DISK, SOME_KEPT), id="olmoe, few"),
        pytest.param("olmoe", MANY, id="olmoe", marks=pytest.mark.long),
        pytest.param("deepseek_v3", MANY, id="deepseek_v3", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("quantize", [None, pytest.param("nf4", marks=pytest.mark.long)])
def test_plans_give_equal_bits(
    family: str, ways: Any, quantize: str | None, tmp_path: Path
) -> None:
    models = []
    for way in ways:
        model = adapted(family, dtype=torch.bfloat16)
        work = {"dtype": "bf16", "quantize": quantize}
        losses = train(model, way, tmp_path, steps=3, work=work)
        models.append((losses, trained(model)))
    (first_losses, first), *others = models
    for losses, tensors in others:
        assert losses == first_losses
        assert all(torch.equal(tensors[name], first[name]) for name in first)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows are outputs", "rows are inputs"])
@pytest.mark.parametrize("swapped", [False, True])
def test_factors_give_the_product_with_the_whole_delta(transposed: bool, swapped: bool) -> None:
    """For both ways in which versions of PEFT assign the two factors to a matrix."""
    experts, rank, inputs, outputs = 3, 2, 5, 7
    first_is_input = swapped != transposed
    sides = (inputs, outputs) if first_is_input else (outputs, inputs)
    drawn = torch.Generator().manual_seed(0)
    a = torch.randn(experts * rank, sides[0], generator=drawn, dtype=torch.float64)
    b = torch.randn(sides[1], rank * experts, generator=drawn, dtype=torch.float64)
    wrapper = SimpleNamespace(
        active_adapters=["one"], num_experts=experts, scaling={"one": 0.5},
        lora_A={"one": SimpleNamespace(weight=a)}, lora_B={"one": SimpleNamespace(weight=b)},
        _did_swap_in_out_features=swapped,
    )  # fmt: skip
    rows = torch.randn(6, inputs, generator=drawn, dtype=torch.float64)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)  # the second expert has no rows

    found = _adapt(wrapper, transposed, rows, ends)

    # As in PEFT's `get_delta_weight`: `[experts, side of A, side of B]`.
    delta = 0.5 * torch.einsum("ore,eri->eio", b.view(-1, rank, experts), a.view(experts, rank, -1))
    by_input = delta if first_is_input else delta.mT
    expected = torch.cat([rows[:2] @ by_input[0], rows[2:] @ by_input[2]])
    torch.testing.assert_close(found, expected)


class LargestResult(TorchDispatchMode):
    """Note the elements of the largest tensor that an operation allocates."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.elements = max(self.elements, out.numel())
        return out


def test_adapted_experts_compile_in_one_graph_and_need_no_tensor_as_large_as_all_experts() -> None:
    model = adapted("olmoe", lora()).get_base_model()
    _, inventory = inspect_model(model, Settings())
    layer: Any = SplitModel(model, inventory, mlp_tile=4096).layers[0]
    hidden = torch.randn(2, 6, 32)
    position = (torch.ones(1, 6, 8), torch.zeros(1, 6, 8))

    with LargestResult() as largest:
        out = layer(hidden, position_embeddings=position)
        out.sum().backward()
    whole = torch.compile(layer, backend="eager", fullgraph=True)

    torch.testing.assert_close(whole(hidden, position_embeddings=position), out)
    weights = layer.mlp.experts.get_base_layer()
    assert 0 < largest.elements < weights.down_proj.numel() < weights.gate_up_proj.numel()


def test_saved_adapters_load_in_peft_and_merge_into_experts(tmp_path: Path) -> None:
    base = engines.plain_model(engines.tiny_config("qwen3_moe"), torch.float32)
    base.save_pretrained(tmp_path / "base")
    batch = {"input_ids": torch.arange(32).view(2, 16)}
    with penstock.prepare(
        str(tmp_path / "base"), lora="r=4,alpha=8", dtype="fp32", context=16, batch=2, lr=1e-2,
        budget={"hbm": "1GiB", "dram": "1GiB"}, device="cpu", compiled=False,
    ) as engine:  # fmt: skip
        for _ in range(2):
            engine.step(batch)
        engine.write(tmp_path / "out")

    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded: Any = peft.PeftModel.from_pretrained(plain, str(tmp_path / "out"))
    found = peft.get_peft_model_state_dict(loaded)
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert sum(".experts." in name for name in saved) == 4, "one layer has experts"

    merge(tmp_path / "out", tmp_path / "merged")
    merged: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    expected = loaded.merge_and_unload().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in merged.state_dict().items())
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert not torch.equal(expected[name], base.state_dict()[name])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("r=4,dropout=0.1", "leave dropout out"),
        ("r=4,parameters=experts.gate", "names experts.gate, and the model has no such parameter"),
        ("r=4,targets=none", "needs the names of parameters"),
        ("r=4,targets=q_proj,parameters=experts.down_proj,layers=0", "PEFT does not apply"),
    ],
)
def test_options_that_do_not_work_with_experts_are_refused(
    options: str, words: str, tmp_path: Path
) -> None:
    engines.tiny_config("olmoe").save_pretrained(tmp_path)

    with pytest.raises(SettingsError, match=words):
        penstock.prepare(str(tmp_path), lora=options, init="random", context=16, batch=2)


def test_parameters_and_no_modules_can_be_chosen(tmp_path: Path) -> None:
    engines.tiny_config("olmoe").save_pretrained(tmp_path)
    options = "r=4,targets=none,parameters=experts.down_proj"
    settings = Settings.of({"lora": options})

    _, inventory = inspect_model(str(tmp_path), settings)

    names = [t.name for block in inventory.blocks for t in block.tensors if t.trainable]
    assert len(names) == 6
    assert all(".mlp.experts.lora_" in name for name in names)


def test_an_adapter_of_the_biases_of_experts_is_added_to_them() -> None:
    """The function that multiplies tokens with experts has factors of matrices only."""
    biases = lora(target_modules=[], target_parameters=["experts.gate_up_proj_bias"])
    model, ids = adapted("gpt_oss", biases), torch.arange(3, 11)[None]
    with torch.no_grad():
        expected = model(ids).logits
        with model.disable_adapter():
            assert not torch.allclose(model(ids).logits, expected, rtol=1e-3, atol=1e-3)
        replace_parametrizations(model.get_base_model().model.layers)
        found = model(ids).logits

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
