"""Fuzzed files and command lines: inputs that once failed, and a fixed sample of others.

`make fuzz-commands` draws new ones, seeded by the date.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.fuzz.kept_inputs import COMMANDS, CONFIGS, RUN_FILES, STATES
from tests.support.fuzzed_commands import KINDS, PLAN, Case, Inputs, problem
from tests.support.manifests import with_file

SEED = 20261116

SAMPLE = 40
"""Number of inputs, about ten seconds."""

CHECKPOINT = "out/checkpoint-000002"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("field", CONFIGS)
def test_a_wrong_config_is_refused_by_file_and_field(field: str, inputs: Inputs) -> None:
    config = json.loads(inputs.text("model/config.json")) | {field: CONFIGS[field]}
    files = {"{model}/config.json": json.dumps(config)}

    ended = inputs.run(Case("config.json", ("plan", "{model}", *PLAN), files))

    assert ended.code == 1, ended.errors
    assert "config.json" in ended.errors
    assert field in ended.errors.replace("attention heads", "num_attention_heads")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_argument_is_refused(name: str, inputs: Inputs) -> None:
    ended = inputs.run(Case("command line", ("plan", "{model}", *PLAN, *COMMANDS[name])))

    assert ended.code in ((0,) if name == "frozen" else (1, 2)), ended.errors
    assert "Traceback" not in ended.errors


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_wrong_settings_file_is_named(name: str, inputs: Inputs) -> None:
    arguments = ("plan", "{model}", "--config", "{here}/run.yaml")

    ended = inputs.run(Case("run.yaml", arguments, {"{here}/run.yaml": RUN_FILES[name]}))

    assert ended.code == 1, ended.errors
    assert "run.yaml" in ended.errors


@pytest.mark.parametrize("change", ["missing", "small"])
def test_a_plan_without_room_for_a_block_is_refused(change: str, inputs: Inputs) -> None:
    plan = json.loads(inputs.text("plan.json"))
    homes = plan["placement"]["blocks"][1]["homes"]
    at = next(i for i, home in enumerate(homes) if home["role"] == "first")
    if change == "missing":
        del homes[at]
    else:
        homes[at]["shares"][0]["nbytes"] = 1
    arguments = ("train", "{model}", "--data", "{data}", "--out", "{here}/new", "--plan", "{plan}",
                 "--steps", "1", "--json")  # fmt: skip

    ended = inputs.run(Case("plan.json", arguments, {"{plan}": json.dumps(plan)}))

    assert ended.code == 1, ended.errors
    assert "placement.blocks[1].homes" in ended.errors


@pytest.mark.parametrize("path", STATES, ids="/".join)
def test_a_wrong_training_state_is_refused(path: tuple[str, ...], inputs: Inputs) -> None:
    state = json.loads(inputs.text(f"{CHECKPOINT}/training_state.json"))
    holder: Any = state
    for key in path[:-1]:
        holder = holder[int(key) if isinstance(holder, list) else key]
    holder[path[-1]] = STATES[path]
    text = json.dumps(state)
    manifest = inputs.text(f"{CHECKPOINT}/complete.json")
    manifest = with_file(manifest, "training_state.json", text.encode())
    folder = "{out}/checkpoint-000002"
    files = {f"{folder}/training_state.json": text, f"{folder}/complete.json": manifest}

    ended = inputs.run(
        Case("state", ("train", "--out", "{out}", "--resume", "--steps", "3"), files)
    )

    assert ended.code == 1, ended.errors
    assert path[-1] in ended.errors or "position" in ended.errors


def test_drawn_inputs_end_with_a_message(inputs: Inputs) -> None:
    for number in range(SAMPLE):
        kind = list(KINDS)[number % len(KINDS)]
        case = KINDS[kind](inputs, random.Random(f"{SEED} {number}"))
        wrong = problem(inputs, case)
        assert not wrong, f"seed {SEED}, number {number}: {wrong}\n{case}"
