"""Draw fuzzed cases over every file and every flag, and judge how their commands end."""

from __future__ import annotations

import functools
import json
import os
import random
from pathlib import Path
from typing import Any

import click
import typer

from penstock.checkpoint.manifest import COMPLETE
from tests.campaign.forks import NOT_RUN, Ended, Limits, penstock, run_fork
from tests.campaign.results import OK, Verdict
from tests.fuzz.edits import ODD, Edit, draw_edit
from tests.fuzz.inputs import COMMANDS, FILES, Case, Inputs, command_line
from tests.fuzz.trainer_command import TRAINER, run_trainer

COMMAND_LINE = "command line"

GROUPS = (*FILES, COMMAND_LINE)

LIMITS = Limits()
RANK_LIMITS = Limits(cpu_seconds=60, wall_seconds=600)
"""Limits of a command that may start ranks: each of them imports torch itself."""

FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "rope_theta",
          "rope_parameters.rope_theta", "num_key_value_heads", "intermediate_size", "x",
          "max_position_embeddings", "tie_word_embeddings", "attention_dropout",
          "hidden_act")  # fmt: skip
"""Fields of `--model-config`."""

LORA_OPTIONS = ("alpha", "targets", "exclude", "layers", "save", "dropout", "bias", "init",
                "rslora", "x")  # fmt: skip
"""Options of `--lora`."""


def draw_case(inputs: Inputs, number: int, rng: random.Random) -> Case:
    """Draw a case. The groups take turns, and command lines have every second."""
    if number % 2:
        return _draw_command(rng)
    group = list(FILES)[number // 2 % len(FILES)]
    file, command = rng.choice(FILES[group])
    edits = [draw_edit(file, inputs.read(file), rng)]
    return Case(command_line(command), tuple(edits), sealed=rng.random() < 0.8)


def _draw_command(rng: random.Random) -> Case:
    """Add odd values of one or two flags to a command line, or replace an argument."""
    # The commands with many flags are drawn more often.
    name = rng.choice((*COMMANDS, "plan", "plan", "plan", "train", "train", "train", "generate"))
    arguments = list(COMMANDS[name])
    at = len(arguments) - arguments[::-1].index("--") - 1 if "--" in arguments else len(arguments)
    for _ in range(rng.randrange(1, 3)):
        if rng.random() < 0.1 and len(arguments) > 1:
            arguments[rng.randrange(1, len(arguments))] = _text(rng.choice(ODD))
            continue
        flag = rng.choice(flags_of(name))
        value = [] if flag.is_flag else [_value(flag.opts[0], rng)]
        arguments[at:at] = [rng.choice((*flag.opts, *flag.secondary_opts)), *value]
    return Case(tuple(arguments))


def _value(flag: str, rng: random.Random) -> str:
    text = _text(rng.choice(ODD))
    if flag == "--model-config" and rng.random() < 0.9:
        return f"{rng.choice(FIELDS)}={text}"
    if flag == "--nvme" and rng.random() < 0.5:
        return "{disk}:" + text
    if flag == "--lora" and rng.random() < 0.9:
        return f"r=4,{rng.choice(LORA_OPTIONS)}={text}"
    if flag == "--vary" and rng.random() < 0.5:
        return f"dram={text}..64GiB"
    return text


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    # A program's arguments cannot contain a null character or a lone surrogate of this kind.
    return text.replace("\x00", "0").replace("\ud800", "\udcff")


@functools.cache
def flags_of(name: str) -> list[click.Option]:
    """Return the flags of a command, from its definition."""
    from penstock.cli.main import app

    command: Any = typer.main.get_command(app)
    for part in COMMANDS[name]:
        if not hasattr(command, "commands"):
            break
        command = command.commands[part]
    return [p for p in command.params if p.param_type_name == "option" and p.name != "help"]


def run_case(inputs: Inputs, case: Case, here: Path) -> Ended:
    """Run a case in a fork, on copies of its files below an empty directory."""
    arguments = inputs.prepare(case, here)
    # An odd path such as ../.. stays inside the directory.
    inside = here / "current/working/directory"
    inside.mkdir(parents=True)

    def command() -> int:
        os.chdir(inside)
        os.environ["HOME"] = str(here)
        if arguments[0] == TRAINER:
            return run_trainer(Path(arguments[1]))
        return penstock(arguments)()

    starts_ranks = arguments[0] == "train" and {"--gpus", str(here / "ranks")} & {*arguments}
    return run_fork(command, here, RANK_LIMITS if starts_ranks else LIMITS)


def judge(case: Case, ended: Ended) -> Verdict:
    """Judge how the command of a case ended."""
    said = f"{ended.errors}\n{ended.output}"
    if ended.code == NOT_RUN:
        raise RuntimeError(f"the case could not be run: {case}\n{ended.errors}")
    if ended.hung:
        # It was accepted, and trains or measures for as long as it was asked to.
        if '"event": "step"' in ended.output or case.arguments[0] in ("bench", "generate"):
            return OK
        return Verdict("hang", f"more than {LIMITS.cpu_seconds} s: {ended.errors[-300:]}")
    if ended.code not in (0, 1, 2) or "Traceback" in ended.errors:
        return Verdict("traceback", f"exit code {ended.code}: {ended.errors[-1500:]}")
    if ended.code == 1 and case.arguments[0] not in ("doctor", "profile"):
        return _judge_message(case, said)
    return OK


def _judge_message(case: Case, said: str) -> Verdict:
    """Judge a refusal: it has one line, or a list of wrong lines, and names a changed file."""
    if '"feasible": false' in said or "does not fit" in " ".join(said.split()):
        return OK
    # `check` lists everything that is damaged.
    start = max(said.find("error: "), said.find("damaged: "))
    if start < 0:
        return Verdict("silent", f"exit code 1 without a message: {said[-300:]}")
    lines = [line for line in said[start:].splitlines() if line.strip()]
    message = "\n".join(lines)
    # The last one is a note of `tokenizers`.
    others = ("also: ", "damaged: ", "DAMAGED: ", "note: ", "{", "Ignored unknown kwarg")
    further = [line for line in lines[1:] if not line.startswith(others)]
    # `generate` prints its summary after a request that failed.
    if further and not lines[0].endswith(":") and case.arguments[0] != "generate":
        return Verdict("silent", f"a message of several lines: {said[start:][:600]}")
    if not case.edits or any(_named(edit, message) for edit in case.edits):
        return OK
    return Verdict("silent", f"does not name {case.edits[0].file}: {message[:600]}")


def _named(edit: Edit, message: str) -> bool:
    """Return whether a message names a file, what the user knows it as, or a path from it."""
    if isinstance(edit.value, str) and edit.value and edit.value[:40] in message:
        return True
    if edit.file == "run.yaml" and edit.path:
        # The name of a setting is enough: the command line, which has no file, may set it, too.
        flag = str(edit.path[-1]).replace("_", "-")
        if f"--{flag}" in message or f"error: {edit.path[-1]}: " in message:
            return True
    name, folder = Path(edit.file).name, Path(edit.file).parent.name
    if name == "config.json" and "scores for token" in message:
        return True  # a right config of a model that overflows
    known_as = {"tokenizer.json": "tokenizer", "tokenizer_config.json": "tokenizer"}
    known_as[COMPLETE] = folder  # the manifest says which files a checkpoint has
    known_as["model.safetensors"] = "tensor"
    known_as["config.json"] = "the checkpoint has other tensors than this model"
    if name in ("tokenizer.json", "tokenizer_config.json") and "saved data position" in message:
        return True  # another tokenizer makes other data
    return name in message or known_as.get(name, name) in message
