"""Training an adapter gives what PEFT gives in plain torch, under any plan."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.engine.model_source import inspect_model
from penstock.model.compile import layer_kinds
from penstock.plan.plan import Plan
from penstock.settings import Settings
from tests.equivalence.runs import DISK, DRAM, RESIDENT, WAYS, Way
from tests.support import engines
from tests.support.adapters import FUSED, adapted, lora, trained
from tests.support.dropout_seeds import seed_like_the_engine
from tests.support.samples import sample
from tests.support.torch_loop import TorchLoop

STEPS = 20
# A large epsilon keeps AdamW from dividing gradients that are nearly zero by their own size.
OPTIMIZER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}

LAYERS = {r"layers\.1\..*": 7}
COPIES = ["embed_tokens", "lm_head"]
TIED = {"tie_word_embeddings": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "qwen3, by root of rank": (
        "qwen3", {"use_rslora": True, "target_modules": ["q_proj", "v_proj"]}, {}),
    "gemma3, ranks by layer": ("gemma3", {"rank_pattern": LAYERS, "alpha_pattern": LAYERS}, {}),
    "gpt2 with Conv1D": ("gpt2", {"fan_in_fan_out": True}, {}),
    "phi3, fused queries, keys and values": ("phi3", {"target_modules": FUSED["phi3"]}, {}),
    "gpt_neox, fused, with biases": (
        "gpt_neox", {"target_modules": FUSED["gpt_neox"], "bias": "all"}, {}),
    "llama, copies of embedding and head": ("llama", {"modules_to_save": COPIES}, {}),
    "llama, adapters of embedding and head": (
        "llama", {"target_modules": [*COPIES, "q_proj"]}, {}),
    "qwen3, tied": ("qwen3", {}, TIED),
    "qwen3, tied, a copy of the embedding": ("qwen3", {"modules_to_save": COPIES[:1]}, TIED),
    "qwen3, tied, one copy of embedding and head": (
        "qwen3", {"modules_to_save": COPIES[:1], "ensure_weight_tying": True}, TIED),
    "llama, one layer": (
        "llama", {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]}, {}),
    "llama, DoRA": ("llama", {"use_dora": True}, {}),
    "qwen3, biases of the adapter": (
        "qwen3", {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
        {"attention_bias": True}),
}  # fmt: skip
IN_HBM = Way("adapters in HBM, weights in DRAM", ("hhhdd",), {"slots": 3, "ahead": 2})
ON_DISK = Way("adapters in HBM, weights on disk", ("hhhnn",), {"piece": 4096, "rounds": 2})
SOME_KEPT = Way("adapters in HBM, some layers kept", ("hhhdd",), {"kept": (3, 0, 2)})
MIXED = Way("adapters in HBM or not", ("hhhhn", "dddd", "hhhdd", "nnnn", "hhhh"))
SOME_WAYS = (RESIDENT, WAYS[8], ON_DISK, MIXED, SOME_KEPT)
MANY_WAYS = (RESIDENT, DRAM, DISK, WAYS[3], WAYS[8], IN_HBM, ON_DISK, MIXED, SOME_KEPT)
SAMPLE = (
    *("gpt2 with Conv1D", "gemma3, ranks by layer", "llama, DoRA"),
    "qwen3, tied, one copy of embedding and head",
)
"""Cases that every run of the tests has; the others are for `make test-long`."""

MANY = ("llama", "gemma3, ranks by layer", "gpt2 with Conv1D")
"""Cases that run under several plans; the others run under one."""


def make_plan(model: Any, way: Way, disk: Path, **work: Any) -> tuple[Plan, Any]:
    """Make the plan of a way for a PEFT model, and return it with its workload."""
    _, inventory = inspect_model(model, Settings())
    assert not inventory.not_trainable, inventory.not_trainable
    work = {"batch": 5, "micro_batch": 2, "clip": 0.5, "dtype": "fp32"} | work
    workload = engines.workload(**work)
    rows, path = way.rows(len(inventory.blocks)), disk if "n" in "".join(way.spots) else None
    plan = engines.make_plan_of(inventory, workload, rows, disk=path, **way.plan)
    return plan, workload


def train(
    model: Any, way: Way, disk: Path, *, steps: int = STEPS, work: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[float]:  # fmt: skip
    """Train a PEFT model in place, and return the losses."""
    plan, workload = make_plan(model, way, disk, **(work or {}))
    batches = engines.batches(steps, workload, model.config.vocab_size)
    options = {"optimizer": OPTIMIZER, "device": "cpu", "self_check": False} | options
    with penstock.prepare(model, plan=plan, **options) as engine:
        return [float(engine.step(batch)) for batch in batches]


def train_plainly(model: Any, **options: Any) -> list[float]:
    """Train a PEFT model in place with torch's AdamW, and return the losses."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    workload = engines.workload(batch=5, micro_batch=2)
    loop = TorchLoop(
        model, clip=0.5, settings=OPTIMIZER, micro_batch=2, frozen=frozen.__contains__, **options
    )
    batches = engines.batches(STEPS, workload, model.config.vocab_size)
    return [loop.step(batch) for batch in batches]


def assert_close(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        size = float(tensor.abs().max())
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5 * size, msg=name)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("case", sample(CASES, SAMPLE))
def test_20_steps_are_those_of_peft_in_plain_torch(
    case: str, tmp_path: Path, one_thread: None
) -> None:
    family, fields, changes = CASES[case]
    model = adapted(family, lora(**fields), **changes)
    plain = copy.deepcopy(model)
    before, frozen = trained(model), untrained(model)
    losses, expected = train(model, WAYS[3], tmp_path), train_plainly(plain)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close(trained(model), trained(plain))
    changed = [n for n, tensor in trained(model).items() if not torch.equal(tensor, before[n])]
    assert changed == list(before), "every tensor of the adapter is trained"
    now = untrained(model)
    assert all(torch.equal(frozen[name], now[name]) for name in frozen), "nothing else is"


def test_dropout_of_adapters_is_that_of_torch_with_the_same_seeds(
    tmp_path: Path, one_thread: None
) -> None:
    model = adapted("gpt2", lora(lora_dropout=0.3, fan_in_fan_out=True))
    plain = copy.deepcopy(model).train()
    seeds = seed_like_the_engine(plain.get_base_model(), 7)
    losses = train(model, WAYS[3], tmp_path, seed=7)
    assert losses == pytest.approx(train_plainly(plain, before_micro_batch=seeds), rel=1e-5)
    assert_close(trained(model), trained(plain))


def test_layers_whose_adapters_differ_in_their_factor_run_separate_code() -> None:
    """Code that is compiled for one layer serves all of its kind, with the factor in it."""
    factors = {r"layers\.1\..*": 5}
    kinds = [
        layer_kinds(adapted("llama", config).get_base_model().model.layers)
        for config in (lora(), lora(alpha_pattern=factors))
    ]
    assert [len(set(each)) for each in kinds] == [1, 2]
    assert kinds[0][0] == kinds[1][0] != kinds[1][1]


def untrained(model: Any) -> dict[str, torch.Tensor]:
    named = model.get_base_model().named_parameters()
    return {name: p.detach().clone() for name, p in named if not p.requires_grad}


@pytest.mark.parametrize(
    ("case", "ways"),
    [
        pytest.param("llama", SOME_WAYS, id="llama, few"),
        *(pytest.param(case, MANY_WAYS, id=case, marks=pytest.mark.long) for case in MANY),
    ],
)
def test_plans_give_equal_bits(case: str, ways: tuple[Way, ...], tmp_path: Path) -> None:
    family, fields, changes = CASES[case]
    models = []
    for way in ways:
        model = adapted(family, lora(**fields), **changes)
        losses = train(model, way, tmp_path, steps=4)
        models.append((losses, trained(model)))
    (first_losses, first), *others = models
    for losses, tensors in others:
        assert losses == first_losses
        assert all(torch.equal(tensors[name], first[name]) for name in first)
