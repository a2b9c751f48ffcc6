"""`prepare` takes the same settings as the command line, and a few arguments of its own."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.engine.plan_choice import workload_for
from penstock.engine.prepare import ARGUMENTS, prepare
from penstock.errors import (
    EngineError,
    PenstockError,
    PlanError,
    SettingsError,
    UnsupportedModelError,
)
from penstock.settings import Settings, settings_fields
from tests.support.engines import plain_model, tiny_config
from tests.support.models import model

BUDGET = {"hbm": "64MiB", "dram": "64MiB"}
SMALL: dict[str, Any] = {"context": 32, "batch": 4, "device": "cpu", "budget": BUDGET}


def llama() -> Any:
    return plain_model(tiny_config("llama"))


def test_settings_by_name_reach_the_workload_and_the_optimizer() -> None:
    with prepare(
        llama(), micro_batch=2, clip=None, moments="bf16", lr=3e-4, betas=(0.8, 0.9),
        deterministic=False, seed=7, nonfinite="skip", accumulate=True, **SMALL,
    ) as engine:  # fmt: skip
        workload, group = engine.workload, engine.optimizer.param_groups[0]
        assert (workload.context, workload.batch) == (32, 4)
        assert (workload.moments, workload.clip, workload.accumulate) == ("bf16", None, True)
        assert workload.numerics.micro_batch == 2
        assert (group["lr"], group["betas"], group["weight_decay"]) == (3e-4, (0.8, 0.9), 0.1)
        assert (engine.settings.seed, engine.settings.nonfinite) == (7, "skip")


def test_a_keyword_overrides_the_settings_and_the_optimizer_mapping_overrides_both() -> None:
    settings = Settings.of({"lr": 1e-3, "weight_decay": 0.2, "context": 16, "batch": 2, **BUDGET})
    optimizer = {"weight_decay": 0.3, "eps": 1e-6}
    with prepare(
        llama(), settings=settings, context=32, optimizer=optimizer, device="cpu"
    ) as engine:
        group = engine.optimizer.param_groups[0]
        assert (engine.workload.context, engine.workload.batch) == (32, 2)
        assert (group["lr"], group["weight_decay"], group["eps"]) == (1e-3, 0.3, 1e-6)
        assert engine.plan.budget.hbm == 64 << 20


@pytest.mark.parametrize(
    ("name", "hint"),
    [("epochs", "it takes context, batch"), ("batch_size", "did you mean 'batch'"),
     ("learning_rate", "it takes context, batch"), ("budgets", "did you mean 'budget'")],
)  # fmt: skip
def test_an_unknown_argument_is_a_type_error_that_names_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; {hint}"):
        prepare(llama(), **{name: 2}, **SMALL)


def test_a_plan_and_a_budget_exclude_each_other() -> None:
    with prepare(llama(), **SMALL) as engine:
        plan = engine.plan
    with pytest.raises(PlanError, match="budget: cannot be combined with a plan"):
        prepare(llama(), plan=plan, **SMALL)


def test_compiled_layers_are_refused_before_anything_is_checked_or_allocated() -> None:
    with pytest.raises(EngineError, match="needs Triton and a GPU") as caught:
        prepare(llama(), compiled=True, **SMALL)

    assert "Leave compiled out" in str(caught.value)


def test_a_plan_for_several_ranks_is_refused() -> None:
    with prepare(llama(), **SMALL) as engine:
        plan = engine.plan
    numerics = replace(plan.workload.numerics, micro_batch=1)
    shared = replace(plan, workload=replace(plan.workload, batch=2, numerics=numerics, world=2))
    with pytest.raises(EngineError, match="the plan is for 2 ranks, but there are 1"):
        prepare(llama(), plan=shared, device="cpu")


def test_label_smoothing_excludes_a_custom_loss_and_another_value_in_the_plan() -> None:
    def nothing(log_probs: Any, targets: Any) -> Any:
        return -log_probs.sum()

    with pytest.raises(PlanError, match=r"label_smoothing: is 0\.1, which cannot be combined"):
        prepare(llama(), loss=nothing, label_smoothing=0.1, **SMALL)
    with prepare(llama(), label_smoothing=0.1, **SMALL) as engine:
        plan = engine.plan
    with pytest.raises(PlanError, match=r"label_smoothing: is 0\.1 in the plan and 0\.2 in the"):
        prepare(llama(), plan=plan, label_smoothing=0.2, device="cpu")


def test_an_unknown_tier_of_a_budget_names_the_tiers() -> None:
    with pytest.raises(PlanError, match="budget: has no tier 'gpu'; the tiers are hbm, dram, cxl"):
        prepare(llama(), **SMALL | {"budget": {"gpu": "1GiB"}})


@pytest.mark.parametrize(
    ("budget", "problem"),
    [
        (
            {"hbm": 1.5},
            'hbm: must be text such as "24GiB" or "auto", or a number',
        ),
        ({"hbm": "1GiB", "dram": None}, "dram: must be text such as"),
        ({"hbm": "1GiB", "nvme": 400}, "nvme: must be text such as"),
        ({"hbm": "1GiB", "nvme": [Path("/")]}, "nvme: must be text such as"),
    ],
)
def test_a_budget_of_another_type_says_what_to_write(budget: Any, problem: str) -> None:
    with pytest.raises(PlanError, match=re.escape(problem)):
        prepare(llama(), **SMALL | {"budget": budget})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": "64MiB"}, "budget: must name tiers, such as .*, got '64MiB'"),
        ({"optimizer": torch.optim.AdamW([torch.zeros(1)])}, "must be a name, .* Got AdamW"),
        ({"model": torch.nn.Linear(2, 2)}, "Linear is no transformers model"),
    ],
)
def test_an_argument_of_another_type_says_what_to_pass(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(PenstockError, match=message):
        prepare(**({"model": llama()} | SMALL | arguments))


def test_an_invalid_setting_names_its_field() -> None:
    with pytest.raises(SettingsError, match=r"^moments: "):
        prepare(llama(), moments="fp8", **SMALL)


def test_the_number_of_steps_may_be_known_better_than_from_the_settings() -> None:
    inventory = model("qwen2.5-3b")
    settings = Settings.of({"epochs": 2.0})

    assert workload_for(inventory, settings, compiled=False).steps is None
    assert workload_for(inventory, settings, steps=9, compiled=False).steps == 9
    assert workload_for(inventory, settings, compiled=False).batch == 8


def hook_the_model(model: Any) -> None:
    model.register_forward_pre_hook(lambda _, inputs: inputs)


def leave_out_dropout(model: Any) -> None:
    layer = model.train().model.layers[1]
    layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.1))
    layer.mlp.eval()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (hook_the_model, "LlamaForCausalLM has hooks"),
        (leave_out_dropout, r"layers\.1\.mlp\.1 has dropout and is in evaluation mode"),
    ],
)
def test_changes_of_a_live_model_that_would_have_no_effect_are_refused(
    change: Any, problem: str
) -> None:
    changed = llama()
    change(changed)
    with pytest.raises(UnsupportedModelError, match=problem):
        prepare(changed, **SMALL)


def test_every_argument_is_documented() -> None:
    signature = inspect.signature(prepare).parameters
    known = {*ARGUMENTS, *signature} - {"arguments"}
    page = (Path(__file__).parents[2] / "docs/train.md").read_text()
    table = page[page.index("Arguments of `prepare`") : page.index("`engine.write` creates")]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = set(re.findall(r"`(\w+)`", " ".join(cells)))

    assert documented == known
    assert all(name in (inspect.getdoc(prepare) or "") for name in known)
    assert set(ARGUMENTS) <= {field.name for field in settings_fields()}
