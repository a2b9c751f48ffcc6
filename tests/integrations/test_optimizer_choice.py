"""The optimizer that the arguments of a trainer ask for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from penstock import optim
from penstock.errors import SettingsError
from penstock.integrations.config import PenstockConfig
from penstock.integrations.optimizer_choice import (
    check_optimizer,
    chooses_optimizer,
    optimizer_options,
)

ARGUMENTS = {"learning_rate": 3e-4, "weight_decay": 0.2, "adam_beta1": 0.8, "adam_beta2": 0.7,
             "adam_epsilon": 1e-6}  # fmt: skip
COMMON = {"lr": 3e-4, "weight_decay": 0.2}
ADAM = {"betas": (0.8, 0.7), "eps": 1e-6}


def options(optimizer: Any = None, chosen: Any = None, name: str = "adamw_torch") -> dict[str, Any]:
    made = (torch.optim.AdamW, ADAM | {"lr": 3e-4, "fused": True})
    args = SimpleNamespace(optim=name, **ARGUMENTS)
    config = PenstockConfig(optimizer=optimizer)
    check_optimizer(config, args, chosen)
    trainer = SimpleNamespace(
        penstock=config, args=args, optimizer_cls_and_kwargs=chosen, model=None,
        get_optimizer_cls_and_kwargs=lambda *_: made,
    )  # fmt: skip

    return optimizer_options(trainer)


def test_the_arguments_for_adam_go_to_the_optimizers_that_use_them() -> None:
    assert options("adamw") == {"name": "adamw", **COMMON, **ADAM}
    assert options("muon") == {"name": "muon", **COMMON, **ADAM}
    assert options("sgd") == {"name": "sgd", **COMMON}
    given = {"name": "sgd", "momentum": 0.9, "weight_decay": 0.0}
    assert options(given) == {"name": "sgd", "lr": 3e-4, "weight_decay": 0.0, "momentum": 0.9}
    assert given["name"] == "sgd", "the caller's options are not changed"


def test_optim_names_an_optimizer_of_the_engine() -> None:
    assert options() == {"name": "adamw", **COMMON, **ADAM}
    # The betas of Adam: transformers passes them to bitsandbytes.
    assert options(name="lion_32bit") == {"name": "lion", **COMMON, "betas": (0.8, 0.7)}


@pytest.mark.parametrize("kind", [torch.optim.SGD, optim.SGD])
def test_a_class_brings_its_own_options(kind: type) -> None:
    given = {"lr": 0.5, "momentum": 0.9, "foreach": True, "maximize": False}
    found = options(chosen=(kind, given))
    assert found == {"name": "sgd", "lr": 0.5, "weight_decay": 0.2, "momentum": 0.9,
                     "dampening": 0, "nesterov": False}  # fmt: skip
    assert options("lion", chosen=(kind, given))["name"] == "lion", "PenstockConfig comes first"


def test_options_that_are_not_given_have_the_defaults_of_the_class() -> None:
    given = {"betas": (0.8, 0.9), "weight_decay": 0.5}
    # Trainer's groups of parameters have the weight decay of the arguments.
    assert options(chosen=(torch.optim.AdamW, given)) == {
        "name": "adamw", "lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.2,
    }  # fmt: skip
    assert options(chosen=(torch.optim.AdamW, {"lr": torch.tensor(0.5)}))["lr"] == 0.5
    assert options(chosen=(torch.optim.AdamW, {}))["betas"] == (0.9, 0.999)
    assert options(chosen=(torch.optim.Adafactor, {}))["eps"] == (2.0**-23, 1e-3)
    assert options(chosen=(optim.Lion, {}))["lr"] == 1e-4


def test_a_class_of_trainer_that_chooses_the_optimizer_itself() -> None:
    class Mine(transformers.Trainer):
        @staticmethod
        def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
            return torch.optim.SGD, {"lr": 0.5}

    trainer: Any = object.__new__(Mine)
    trainer.penstock, trainer.model = PenstockConfig(), None
    trainer.optimizer_cls_and_kwargs = None
    trainer.args = SimpleNamespace(optim="lion_32bit", **ARGUMENTS)
    assert optimizer_options(trainer)["name"] == "sgd"
    assert chooses_optimizer(Mine)
    assert not chooses_optimizer(transformers.Trainer)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"optimizer": "adam"}, "^optimizer: must be one of adamw, .* got adam"),
        ({"optimizer": {"lr": 1.0}}, "^optimizer: must be one of .* got None"),
        ({"name": "adamw_bnb_8bit"}, r"^optim: is adamw_bnb_8bit.*moments='int8'"),
        ({"name": "adafactor"}, "^optim: is adafactor.* not the Adafactor of torch"),
        ({"name": "galore_adamw"}, "^optim: is galore_adamw, which Penstock does not have"),
        ({"chosen": (torch.optim.Adam, {})}, "^optimizer_cls_and_kwargs: has Adam: set optim"),
        (
            {"chosen": (optim.AdamW, {"decoupled_weight_decay": False})},
            "^optimizer_cls_and_kwargs: has decoupled_weight_decay",
        ),
        (
            {"chosen": (torch.optim.AdamW, {"amsgrad": True})},
            "^optimizer_cls_and_kwargs: has amsgrad; Penstock's adamw takes lr, betas",
        ),
    ],
)
def test_what_the_engine_lacks_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem) as caught:
        options(**given)
    if given.get("name") == "galore_adamw":
        assert "8 bits" not in str(caught.value)
