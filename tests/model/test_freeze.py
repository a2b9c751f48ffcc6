"""Patterns of tensors that are not trained: one that matches nothing is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine.prepare import prepare
from penstock.errors import SettingsError
from penstock.model.freeze import check_freeze
from penstock.model.survey import survey
from tests.support.engines import plain_model, tiny_config
from tests.train.runs import RESIDENT, make_model, run_command

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("embed_tokens.*", r"`\*embed_tokens.\*\*` matches model.embed_tokens.weight$"),
        ("model.layers.0", r"`\*model.layers.0\*` matches model.layers.0.* and 11 more"),
        ("model.layrs.*", "the model has 434 tensors, such as .*model.layers"),
        ("lm_head.*", ".*A tied head has the name of the embedding"),
    ],
)
def test_a_pattern_that_matches_nothing_is_named(pattern: str, words: str) -> None:
    inventory = survey(CONFIGS / "qwen2.5-3b")

    with pytest.raises(SettingsError, match=f"matches no tensor; {words}"):
        check_freeze(inventory, ["model.embed_tokens.*", pattern])


def test_all_commands_refuse_it(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    sizes = ["--context", "32", "--batch", "2", *RESIDENT, "--freeze", "embed"]
    data = tmp_path / "texts.txt"
    data.write_text("Water runs down.")

    plan = run_command(["plan", str(model), *sizes, "--machine", "this"])
    train = run_command(
        ["train", str(model), *sizes, "--data", str(data), "--out", str(tmp_path / "out")]
    )

    for refused in (plan, train):
        assert refused.code == 1
        assert "freeze: 'embed' matches no tensor; `*embed*` matches" in refused.errors
    assert not (tmp_path / "out").exists()
    with pytest.raises(SettingsError, match="matches no tensor"):
        prepare(model, context=32, batch=2, freeze=["embed"], device="cpu")


def test_a_model_with_all_tensors_frozen_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    sizes = ["--context", "32", "--batch", "2", *RESIDENT, "--freeze", "*"]
    data = tmp_path / "texts.txt"
    data.write_text("Water runs down.")
    live = plain_model(tiny_config("llama"))
    live.requires_grad_(False)

    plan = run_command(["plan", str(model), *sizes, "--machine", "this"])
    train = run_command(
        ["train", str(model), *sizes, "--data", str(data), "--out", str(tmp_path / "out")]
    )

    for refused in (plan, train):
        assert refused.code == 1
        assert "freeze: leaves nothing to train: all " in refused.errors
    assert not (tmp_path / "out").exists()
    with pytest.raises(SettingsError, match="nothing to train"):
        prepare(live, context=32, batch=2, device="cpu")
