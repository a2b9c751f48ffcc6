"""Settings: where they come from, which wins, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from penstock.train.errors import SettingsError
from penstock.train.learning_rate import Rate
from penstock.train.settings import (
    Interval,
    RunSettings,
    parse_changes,
    parse_interval,
    read_yaml,
    settle,
    write_yaml,
)

NEEDED = {"model": "m", "data": ["d"], "out": "o"}


def settled(*layers: dict[str, Any]) -> RunSettings:
    return settle([("", NEEDED), *(("file", layer) for layer in layers)])


def test_the_stronger_layer_wins_and_defaults_stay() -> None:
    told = settled({"lr": 1e-4, "batch": 4}, {"lr": 2e-4})

    assert (told.lr, told.batch, told.context) == (2e-4, 4, 4096)


def test_saying_one_takes_its_rival_back() -> None:
    assert settled({"epochs": 2}, {"steps": 5}).epochs is None
    assert settled({"plan": "p.json"}, {"dram": "4GiB"}).plan is None
    assert settled({"dram": "4GiB"}, {"plan": "p.json"}).dram == "auto"
    with pytest.raises(SettingsError, match="cannot both be given"):
        settled({"epochs": 2, "steps": 5})


def test_texts_are_read_as_what_they_mean() -> None:
    told = settled({"lr": "1e-5", "betas": "0.8,0.9", "data": "one.jsonl", "micro_batch": 4,
                    "save_every": 10, "log": "tensorboard,wandb", "epochs": 2})  # fmt: skip

    assert (told.lr, told.betas, told.data) == (1e-5, (0.8, 0.9), ("one.jsonl",))
    assert (told.micro_batch_size, told.save_every, told.epochs) == (4, "10", 2.0)
    assert told.log == ("tensorboard", "wandb")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1.0),
        ("batch", 0),
        ("batch", "many"),
        ("context", 1),
        ("keep", 0),
        ("moments", "fp8"),
        ("micro_batch", "0"),
        ("micro_batch", "²"),
        ("betas", [0.9, 1.0]),
        ("log", ["mlflow"]),
        ("save_every", "0"),
        ("model_config", [1]),
        ("deterministic", "yes"),
    ],
)
def test_what_makes_no_sense_names_the_file_and_the_field(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=f"file: {name}") as refused:
        settled({name: value})

    assert refused.value.field.startswith(name)


def test_an_unknown_name_gets_the_nearest_known_one() -> None:
    with pytest.raises(SettingsError, match=r"wamup.*did you mean warmup"):
        settled({"wamup": 0.1})


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model_config": {"rope_theta": 1e6}, "freeze": ["a.*"], "lr": 3e-4}
    told = settled(changes)
    path = tmp_path / "run.yaml"

    write_yaml(told, path, ["a remark"])

    assert path.read_text().startswith("# a remark\n")
    assert settle([("", read_yaml(path))]) == told


def test_files_that_are_no_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for text, words in (("- 1", "names and values"), ("a: [", "is not YAML")):
        path.write_text(text)
        with pytest.raises(SettingsError, match=words):
            read_yaml(path)
    with pytest.raises(SettingsError, match="cannot be read"):
        read_yaml(tmp_path / "missing.yaml")


def test_changes_of_the_model_config() -> None:
    told = parse_changes(["rope_theta=1e6", "tie_word_embeddings=true", "hidden_act=gelu", "a=[1]"])

    assert told == {"rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "gelu", "a": [1]}
    with pytest.raises(SettingsError):
        parse_changes(["rope_theta"])


def test_every_setting_has_words() -> None:
    assert all(field.metadata["help"].endswith(".") for field in dataclasses.fields(RunSettings))


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("30min", Interval(seconds=1800)),
        ("90 s", Interval(seconds=90)),
        ("1.5h", Interval(seconds=5400)),
        ("500", Interval(steps=500)),
    ],
)
def test_intervals(text: str, interval: Interval) -> None:
    assert parse_interval(text) == interval


@pytest.mark.parametrize("text", ["soon", "-3", "0", "1.5", "3 weeks", ""])
def test_intervals_that_are_none(text: str) -> None:
    with pytest.raises(SettingsError, match="30min"):
        parse_interval(text)


def test_an_interval_is_due() -> None:
    assert Interval(steps=3).is_due(steps=3, seconds=0)
    assert not Interval(steps=3).is_due(steps=2, seconds=1e9)
    assert Interval(seconds=5).is_due(steps=1, seconds=5)
    assert not Interval(seconds=5).is_due(steps=0, seconds=9)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_rate_is_hugging_face_s(schedule: str) -> None:
    import torch
    from transformers import get_scheduler

    steps, warmup = 20, 5
    names = {"constant": "constant_with_warmup"}
    theirs = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    plain = get_scheduler(names.get(schedule, schedule), theirs, warmup, steps)
    ours = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    rate = Rate.of(settled({"schedule": schedule, "warmup": 0.25}), steps)
    made = rate.scheduler(ours, taken=0, highest=0.5)
    for _ in range(steps):
        assert made.get_last_lr()[0] == pytest.approx(plain.get_last_lr()[0], abs=1e-12)
        for optimizer, scheduler in ((theirs, plain), (ours, made)):
            optimizer.step()
            scheduler.step()


def test_a_rate_that_is_taken_up_in_the_middle_is_the_same_to_the_bit() -> None:
    import torch

    rate = Rate("cosine", 3, 20)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = rate.scheduler(optimizer, taken=0, highest=0.5)
    for _ in range(11):
        optimizer.step()
        scheduler.step()
    later = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)

    assert rate.scheduler(later, taken=11, highest=0.5).get_last_lr() == scheduler.get_last_lr()
