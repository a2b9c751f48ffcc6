"""Settings: which source wins, what is refused, and how files are read and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import SettingsError
from penstock.settings import (
    GROUP_OF,
    GROUPS,
    Interval,
    Settings,
    merge_layers,
    parse_assignments,
    parse_interval,
    read_yaml,
    settings_fields,
    write_yaml,
)

REQUIRED = {"model": "m", "data": ["d"], "out": "o"}

OLD_RUN_FILE = """\
# Penstock 0.1.0; 6 steps; plan.json says what rests where
# budget: hbm 64 MiB, dram 64 MiB
# micro-batch 2
model: meta-llama/Llama-3.1-8B
data:
- texts.jsonl
out: out
context: 32
batch: 4
epochs: null
steps: 6
micro_batch: '2'
hbm: 64MiB
dram: 64MiB
cxl: auto
nvme:
- /mnt/nvme:64MiB
moments: fp32
plan: null
lr: 0.01
schedule: linear
warmup: 0.03
betas:
- 0.9
- 0.95
weight_decay: 0.1
clip: 1.0
dtype: bf16
freeze: []
model_config:
  rope_theta: 1000000.0
init: pretrained
revision: null
trust_remote_code: false
eval_data: []
eval_split: 0.2
eval_every: null
sample_prompts: null
sample_new: 64
overlong: truncate
skip_bad_lines: false
cache: null
save_every: 30min
keep: 2
save_weights_only: false
on_nonfinite: raise
deterministic: false
seed: 0
log: []
"""
"""A run.yaml as version 0.1 wrote it: flat, without groups."""


def merge(*layers: dict[str, Any]) -> Settings:
    return merge_layers([("", REQUIRED), *(("file", layer) for layer in layers)])


def test_field_names_are_unique_across_groups() -> None:
    assert len(settings_fields()) == len(GROUP_OF)
    assert set(GROUPS) == set(GROUP_OF.values())


def test_every_setting_has_a_help_sentence() -> None:
    for field in settings_fields():
        help_ = field.metadata["help"]
        assert help_.endswith(".")
        assert help_[0].isupper()


def test_sizes_that_are_not_given_are_assumed_within_the_models_limit() -> None:
    for given, limit, expected in (
        ({}, None, (4096, 8)),
        ({}, 1024, (1024, 8)),
        ({"context": 2048}, 1024, (2048, 8)),  # refused later, by name
        ({"batch": 3}, 1 << 20, (4096, 3)),
    ):
        settings = Settings.of(given).with_assumed_sizes(limit)
        assert (settings.data.context, settings.schedule.batch) == expected


def test_the_last_layer_wins_and_defaults_remain() -> None:
    settings = merge({"lr": 1e-4, "batch": 4}, {"lr": 2e-4})

    assert settings.schedule.lr == 2e-4
    assert settings.schedule.batch == 4
    assert settings.schedule.weight_decay == 0.1


def test_a_setting_removes_those_it_excludes_from_weaker_layers() -> None:
    assert merge({"epochs": 2}, {"steps": 5}).schedule.epochs is None
    assert merge({"plan": "p.json"}, {"dram": "4GiB"}).memory.plan is None
    assert merge({"dram": "4GiB"}, {"plan": "p.json"}).memory.dram == "auto"
    with pytest.raises(SettingsError, match="cannot be combined"):
        merge({"epochs": 2, "steps": 5})


def test_text_is_converted_to_the_type_of_the_field() -> None:
    settings = merge({"lr": "1e-5", "betas": "0.8,0.9", "data": "one.jsonl", "micro_batch": 4,
                      "save_every": 10, "log": "tensorboard,wandb", "epochs": 2})  # fmt: skip

    assert settings.schedule.lr == 1e-5
    assert settings.schedule.betas == (0.8, 0.9)
    assert settings.schedule.epochs == 2.0
    assert settings.schedule.micro_batch_size == 4
    assert settings.data.data == ("one.jsonl",)
    assert settings.checkpoint.save_every == "10"
    assert settings.logging.log == ("tensorboard", "wandb")


def test_none_turns_clipping_off_and_micro_batches_automatic() -> None:
    settings = Settings.of({"clip": None, "micro_batch": None})

    assert settings.schedule.clip == 0.0
    assert settings.schedule.micro_batch_size is None


def test_replacing_values_keeps_all_others() -> None:
    settings = merge({"lr": 1e-4, "freeze": ["a.*"]})

    changed = settings.replace({"lr": 2e-4})

    assert changed.flat() == {**settings.flat(), "lr": 2e-4}


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
        ("log", ["comet"]),
        ("save_every", "0"),
        ("model_config", [1]),
        ("deterministic", "yes"),
        ("out", ""),
        ("cache", ""),
        ("sample_prompts", ""),
        ("columns", ["prompt=a", "prompt=b"]),
    ],
)
def test_an_invalid_value_is_reported_with_its_file_and_field(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=f"file: {name}") as refused:
        merge({name: value})

    assert refused.value.field.startswith(name)


def test_an_unknown_name_is_reported_with_the_closest_known_one() -> None:
    with pytest.raises(SettingsError, match=r"wamup.*did you mean warmup"):
        merge({"wamup": 0.1})


def test_written_settings_are_nested_by_group_and_read_back(tmp_path: Path) -> None:
    import yaml

    changes: dict[str, Any] = {"model_config": {"rope_theta": 1e6}, "freeze": ["a.*"], "lr": 3e-4}
    settings = merge(changes)
    path = tmp_path / "run.yaml"

    write_yaml(settings, path, ["a remark"])

    assert path.read_text().startswith("# a remark\n")
    assert set(yaml.safe_load(path.read_text())) == set(GROUPS)
    assert merge_layers([("", read_yaml(path))]) == settings


def test_a_flat_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(OLD_RUN_FILE)

    settings = merge_layers([(str(path), read_yaml(path))])

    assert settings.model.model == "meta-llama/Llama-3.1-8B"
    assert settings.model.model_config == {"rope_theta": 1e6}
    assert settings.data.data == ("texts.jsonl",)
    assert settings.schedule.schedule == "linear"
    assert settings.schedule.micro_batch_size == 2
    assert settings.memory.nvme == ("/mnt/nvme:64MiB",)
    assert settings.evaluation.eval_split == 0.2


def test_a_file_may_mix_groups_and_flat_names_with_hyphens(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: m\nschedule:\n  micro-batch: 2\n  schedule: linear\nmemory:\ndata:\nsave-every: 3\n"
    )

    settings = merge_layers([("", read_yaml(path))])

    assert settings.model.model == "m"
    assert settings.schedule.schedule == "linear"
    assert settings.schedule.micro_batch_size == 2
    assert settings.checkpoint.save_every == "3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "must map names to values"),
        ("a: [", "is not YAML"),
        ("memory: 3", "memory: must map names to values"),
        ("lr: 1\nschedule:\n  lr: 2\n", "lr: is given twice"),
        ("steps: 1\nlr: 1\nsteps: 2\n", "steps: is given twice"),
        ("schedule: {lr: 1, steps: 2, lr: 3}", "lr: is given twice"),
        ("save-every: 1\nsave_every: 2\n", "save_every: is given twice"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)

    with pytest.raises(SettingsError, match=message):
        read_yaml(path)


def test_a_file_may_have_anchors_and_merges(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "memory: &memory {hbm: 1GiB, dram: 2GiB}\n"
        "model: {model_config: {a: &a {b: 1}, c: *a, d: {<<: *a, b: 2}}}\n"
    )

    read = read_yaml(path)

    assert (read["hbm"], read["dram"]) == ("1GiB", "2GiB")
    assert read["model_config"]["d"] == {"b": 2}


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        read_yaml(tmp_path / "missing.yaml")


def test_assignments_are_parsed_as_json_or_text() -> None:
    changes = parse_assignments(["rope_theta=1e6", "tied=true", "hidden_act=gelu", "a=[1]"])

    assert changes == {"rope_theta": 1e6, "tied": True, "hidden_act": "gelu", "a": [1]}
    with pytest.raises(SettingsError):
        parse_assignments(["rope_theta"])


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("30min", Interval(seconds=1800)),
        ("90 s", Interval(seconds=90)),
        ("1.5h", Interval(seconds=5400)),
        ("500", Interval(steps=500)),
    ],
)
def test_an_interval_is_parsed(text: str, interval: Interval) -> None:
    assert parse_interval(text) == interval


@pytest.mark.parametrize("text", ["soon", "-3", "0", "1.5", "3 weeks", ""])
def test_an_invalid_interval_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="30min"):
        parse_interval(text)


def test_an_interval_is_due_at_multiples_of_its_steps_or_after_its_seconds() -> None:
    due = [step for step in range(14, 45) if Interval(steps=10).is_due(
        step=step, last=max(13, (step - 1) // 10 * 10), seconds=0)]  # fmt: skip
    assert due == [20, 30, 40]
    assert not Interval(steps=3).is_due(step=2, last=0, seconds=1e9)
    assert Interval(seconds=5).is_due(step=1, last=0, seconds=5)
    assert not Interval(seconds=5).is_due(step=4, last=4, seconds=9)


def test_a_plan_and_budgets_from_one_source_exclude_each_other() -> None:
    with pytest.raises(SettingsError, match=r"hbm: cannot be combined with the plan p\.json"):
        merge({"plan": "p.json", "hbm": "3MiB"})
    with pytest.raises(SettingsError, match="nvme: cannot be combined"):
        merge({"plan": "p.json", "nvme": ["/mnt:1GiB"]})
    assert merge({"hbm": "3MiB"}, {"plan": "p.json"}).memory.hbm == "auto"
    assert merge({"plan": "p.json", "hbm": "auto", "nvme": []}).memory.plan == "p.json"


def test_steps_and_epochs_exclude_each_other() -> None:
    with pytest.raises(SettingsError, match="steps: cannot be combined with epochs; give one"):
        merge({"steps": 3, "epochs": 1})
