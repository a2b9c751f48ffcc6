"""The best model, the layout for uploads, and the model card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from penstock.checkpoint.run_directory import remove_leftovers
from penstock.engine.engine import Engine, Evaluation
from penstock.errors import SettingsError
from penstock.generate.load import find_weights
from penstock.settings import Settings
from penstock.train.best_model import BestModel
from penstock.train.model_card import MARK, TrainingResult, model_card, write_model_card
from tests.train.runs import RESIDENT, Runs


def test_the_best_model_is_kept_and_the_hub_layout_holds_only_the_model(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([9.0, 5.0, 3.0, 4.0, 3.5])  # before training, and after each of four steps
    monkeypatch.setattr(Engine, "evaluate", lambda self, batches: Evaluation(next(losses), 7))
    out = tmp_path / "out"
    flags = ("--steps", "4", "--eval-every", "1", "--save-best", "--hub-layout", "--keep", "4",
             "--save-every", "1")  # fmt: skip

    result = runs.run(out, *RESIDENT, *flags)

    assert result.code == 0, result.errors
    assert json.loads((out / "best/best.json").read_text()) == {"step": 2, "loss": 3.0}
    best = transformers.AutoModelForCausalLM.from_pretrained(out / "best").state_dict()
    second = transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint-000002")
    assert all(torch.equal(best[name], value) for name, value in second.state_dict().items())
    assert not list((out / "best").glob("optimizer*"))

    found = {path.name for path in (out / "model").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= found
    assert not [name for name in found if "optimizer" in name or "checkpoint" in name]
    assert not (out / "model.safetensors").exists()
    assert find_weights(str(out)) == result.of("done")[0]["model"] == str(out / "model")
    transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    card = (out / "model/README.md").read_text()
    assert "| evaluation loss, at the end | 3.5000 |" in card
    assert "| steps | 4 |" in card
    assert str(tmp_path) not in card


def test_a_resumed_run_compares_with_the_best_so_far(tmp_path: Path) -> None:
    class Saver:
        out, model_nbytes = tmp_path, 1

        def find_directory(self) -> None:
            return

        def write_tensors(self, folder: Path, *, optimizer: bool) -> None:
            assert not optimizer
            (folder / "model.safetensors").write_text("weights")

    def best() -> BestModel:
        return BestModel(Saver())  # type: ignore[arg-type]

    assert best().offer(3, float("nan")) is None
    assert best().offer(3, 2.0) == tmp_path / "best"
    assert best().loss == 2.0
    assert best().offer(4, 2.0) is None
    assert best().offer(5, 1.5) == tmp_path / "best"
    assert json.loads((tmp_path / "best/best.json").read_text())["step"] == 5
    (tmp_path / ".best.tmp-999999-0123abcd").mkdir()  # left by a run that was killed
    assert [path.name for path in remove_leftovers(tmp_path)] == [".best.tmp-999999-0123abcd"]
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_the_best_model_needs_an_evaluation() -> None:
    with pytest.raises(SettingsError, match="save_best: needs data to evaluate on"):
        Settings.of({"save_best": True})
    assert Settings.of({"save_best": True, "eval_split": 0.1}).evaluation.save_best


def test_a_card_names_public_models_and_data_and_keeps_files_private(tmp_path: Path) -> None:
    secret = tmp_path / "customers.jsonl"
    secret.write_text("")
    values = {"model": "Qwen/Qwen2.5-3B", "data": (str(secret), "HuggingFaceH4/no_robots"),
              "out": str(tmp_path / "mine"), "lr": 2e-5, "context": 64, "batch": 2}  # fmt: skip
    card = model_card(Settings.of(values), TrainingResult(steps=1200, loss=1.25))

    assert "base_model: Qwen/Qwen2.5-3B" in card
    assert "on HuggingFaceH4/no_robots and 1 local file." in card
    assert "customers" not in card
    assert "| steps | 1,200 |" in card
    assert "| lr | 2e-05 |" in card
    assert "evaluation loss" not in card


def test_a_card_that_the_user_wrote_stays(tmp_path: Path) -> None:
    settings = Settings.of({"out": str(tmp_path)})
    write_model_card(tmp_path, settings, TrainingResult(steps=1))
    write_model_card(tmp_path, settings, TrainingResult(steps=2))
    path = tmp_path / "README.md"
    assert "| steps | 2 |" in path.read_text()
    path.write_text(path.read_text().replace(MARK, ""))
    write_model_card(tmp_path, settings, TrainingResult(steps=3))
    assert "| steps | 2 |" in path.read_text()
