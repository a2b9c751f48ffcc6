"""The rules of optimizers for tensors that are updated element by element."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from penstock.engine.optimizer import element_rule
from penstock.optim.rules import RuleName
from penstock.optimizer_options import WHOLE_TENSOR
from penstock.roles import OptimizerName


def test_every_optimizer_has_the_rule_of_its_own_name_or_updates_whole_tensors() -> None:
    for kind in get_args(OptimizerName):
        assert element_rule(kind) == ("adamw" if kind in WHOLE_TENSOR else kind)
        assert element_rule(kind) in get_args(RuleName)


def test_an_optimizer_without_a_rule_is_not_adamw() -> None:
    unknown: Any = "adan"
    with pytest.raises(ValueError, match="adan has no rule"):
        element_rule(unknown)
