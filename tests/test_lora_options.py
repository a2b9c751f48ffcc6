"""The options of `--lora`."""

from __future__ import annotations

import pytest

from penstock.errors import SettingsError
from penstock.lora_options import LARGEST_RANK, LoraOptions


def test_options_are_read_with_their_types() -> None:
    given = "r=4,alpha=6.5,targets=q_proj + v_proj,exclude=lm_head,layers=0-2+7+1,save=embed_tokens"
    found = LoraOptions.parse([*given.split(","), "dropout=0.25", "bias=all", "rslora"])
    assert found == LoraOptions(
        r=4, alpha=6.5, targets=("q_proj", "v_proj"), exclude=("lm_head",), layers=(0, 1, 2, 7),
        save=("embed_tokens",), dropout=0.25, bias="all", rslora=True,
    )  # fmt: skip
    assert type(found.r) is int
    assert found.scale == 6.5


def test_without_options_the_factor_is_twice_the_rank() -> None:
    found = LoraOptions.parse([])
    assert found == LoraOptions(r=16, targets=("all-linear",))
    assert found.scale == 32.0
    assert LoraOptions.parse(["rslora=false"]).rslora is False
    assert LoraOptions.parse([f"r={LARGEST_RANK}"]).r == LARGEST_RANK


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rnk=4", "no option 'rnk'"),
        ("r", "needs a value for r"),
        ("r=", "needs a value for r"),
        ("r=2.5", "must have a whole number for r, got '2.5'"),
        ("r=nan", "must have a number for r"),
        ("r=inf", "must have a number for r"),
        ("r=0", "must have a rank r from 1"),
        (f"r={LARGEST_RANK + 1}", "must have a rank r from 1"),
        ("alpha=0", "must have an alpha above 0"),
        ("dropout=1", "at least 0 and below 1"),
        ("dropout=-0.1", "at least 0 and below 1"),
        ("rslora=yes", "has rslora=yes; write rslora"),
        ("targets=a++b", "must have names joined by"),
        ("targets=a,layers=x", "must have numbers such as 0-3"),
        ("targets=a,layers=3-", "must have numbers such as 0-3"),
        ("targets=a,layers=7-3", "must have ranges of layers that count up, got '7-3'"),
        ("targets=a,layers=0-999999", "has too many layers"),
        ("layers=0-2", "needs the names of modules in targets="),
        ("r=4,r=8", "has the option r twice"),
    ],
)
def test_wrong_options_are_refused(text: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        LoraOptions.parse(text.split(","))
