"""Change the files and the command lines that users write, and run the commands on them.

Every input must end with exit code 0, 1 or 2 within seconds, without a traceback and without a
large allocation.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import shutil
import signal
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.units import GiB
from tests.support.manifests import sign, with_file
from tests.train.runs import RESIDENT, RunResult, Runs, run_command

SECONDS = 20
"""Time limit of one command. Most take less than one second; a slow machine may need more."""

ADDRESS_SPACE = 4 * GiB
"""Memory that one command may map in addition to what the process has."""

PLAN = ("--context", "32", "--batch", "4", "--machine", "desktop-24gb", "--json")

ODD: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, 10**400),
    *(0.0, 0.5, -1.5, 1e-300, 1e300, 1e9),
    *(True, False, None, "", "1", "x", "auto", "\x00", "nan", "9" * 5000, "é" * 50, "../..", "*"),
    *([], [0], [1, "x", None], {}, {"a": 1}, [[[[]]]], {"": {"": {}}}),
)
"""Values that are rarely right."""


@dataclass(frozen=True)
class Case:
    """A command line, and the content of files that it reads."""

    kind: str
    arguments: tuple[str, ...]
    """`{model}`, `{data}`, `{out}`, `{plan}` and `{here}` stand for paths."""
    files: dict[str, str] = field(default_factory=dict)
    """New content of files, by their path with the same placeholders."""


class TimeLimitError(BaseException):
    """A command took too long. No handler for `Exception` may catch it."""


class Inputs:
    """A tiny model, its data, a plan file and a finished run, which cases change copies of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = Runs(folder / "inputs")
        self.plan = folder / "inputs" / "plan.json"
        self.out = folder / "inputs" / "out"
        trained = self.runs.run(self.out, *RESIDENT, "--steps", "2", "--save-every", "1")
        assert trained.code == 0, trained.errors
        shutil.copy(self.out / "plan.json", self.plan)
        self.number = 0

    def text(self, name: str) -> str:
        """Return the content of an input file, such as `model/config.json`."""
        return (self.folder / "inputs" / name).read_text()

    def run(self, case: Case) -> RunResult:
        """Run a case on copies of the files, within the limits of time and memory."""
        self.number += 1
        here = self.folder / f"case-{self.number}"
        here.mkdir()
        places = {"here": here, "data": self.runs.data}
        for name in ("model", "out", "plan"):
            if name in " ".join((*case.arguments, *case.files)):
                source = {"model": self.runs.model, "out": self.out, "plan": self.plan}[name]
                places[name] = here / source.name
                copy = shutil.copytree if source.is_dir() else shutil.copy
                copy(source, places[name])
        for path, content in case.files.items():
            file = Path(_fill(path, places))
            file.write_bytes(content.encode("utf-8", "surrogateescape"))
        try:
            with _limits():
                return run_command([_fill(part, places) for part in case.arguments])
        finally:
            shutil.rmtree(here, ignore_errors=True)


def problem(inputs: Inputs, case: Case) -> str:
    """Run a case and return what is wrong with how it ended; "" if nothing is."""
    try:
        ended = inputs.run(case)
    except TimeLimitError:
        return f"took more than {SECONDS} s"
    if ended.code not in (0, 1, 2):
        return f"exit code {ended.code}: {ended.errors[-600:]}"
    if ended.code == 1 and not (
        "error: " in ended.errors + ended.output or '"feasible": false' in ended.output
    ):
        return f"exit code 1 without a message: {ended.output[-300:]}"
    if "Traceback" in ended.errors:
        return f"traceback: {ended.errors[-600:]}"
    return ""


def _fill(text: str, places: dict[str, Path]) -> str:
    # Not str.format: a fuzzed text may contain braces.
    for name, path in places.items():
        text = text.replace("{" + name + "}", str(path))
    return text


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeLimitError

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE, hard))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# Changes.


def change_json(text: str, rng: random.Random) -> str:
    """Change one value of a JSON file, remove it, or damage the text."""
    if rng.random() < 0.15:
        return damage(text, rng)
    return json.dumps(change_value(json.loads(text), rng))


def change_value(data: Any, rng: random.Random) -> Any:
    """Change, rename or remove one value."""
    *path, last = rng.choice(list(_paths(data)))
    holder = data
    for key in path:
        holder = holder[key]
    if rng.random() < 0.1:
        del holder[last]
    elif rng.random() < 0.1 and isinstance(holder, dict):
        holder[f"{last}x"] = holder.pop(last)
    else:
        holder[last] = _odd(rng, holder[last])
    return data


def damage(text: str, rng: random.Random) -> str:
    """Cut a text off, repeat or replace a part of it, or nest it deeply."""
    at, length = rng.randrange(len(text) + 1), rng.randrange(1, 20)
    return rng.choice(
        (
            text[:at],
            text[:at] + text[at + length :],
            text[:at] + text[at : at + length] * 2 + text[at + length :],
            text[:at] + "".join(rng.choices(string.printable, k=length)) + text[at + length :],
            "[" * 10 ** rng.randrange(2, 6),
            '{"a":' * 10 ** rng.randrange(2, 5) + "1",
            text.replace("1", "9" * 5000, 1),
        )
    )


def _odd(rng: random.Random, value: Any) -> Any:
    if isinstance(value, int | float) and rng.random() < 0.4:
        return rng.choice((value + 1, value - 1, -value, value * 2, float(value), str(value)))
    if isinstance(value, list) and value and rng.random() < 0.4:
        return rng.choice((value[:-1], [*value, value[-1]], value[::-1]))
    return rng.choice(ODD)


def _paths(data: Any) -> Iterator[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        yield (key,)
        if isinstance(value, dict | list):
            for path in _paths(value):
                yield (key, *path)


# Kinds of inputs.


def change_config(inputs: Inputs, rng: random.Random) -> Case:
    changed = change_json(inputs.text("model/config.json"), rng)
    return Case("config.json", ("plan", "{model}", *PLAN), {"{model}/config.json": changed})


def change_run_yaml(inputs: Inputs, rng: random.Random) -> Case:
    import yaml

    text = inputs.text("out/run.yaml")
    if rng.random() < 0.7:
        text = yaml.safe_dump(change_value(yaml.safe_load(text), rng))
    else:
        text = damage(text, rng)
    arguments = ("plan", "{model}", "--config", "{here}/run.yaml", "--machine", "desktop-24gb")
    return Case("run.yaml", arguments, {"{here}/run.yaml": text})


def change_plan(inputs: Inputs, rng: random.Random) -> Case:
    arguments = ("train", "{model}", "--data", "{data}", "--out", "{here}/new", "--plan", "{plan}",
                 "--steps", "1", "--json")  # fmt: skip
    return Case("plan.json", arguments, {"{plan}": change_json(inputs.text("plan.json"), rng)})


def change_state(inputs: Inputs, rng: random.Random) -> Case:
    folder = "checkpoint-000002"
    name = rng.choice(("training_state.json", "training_state.json", "complete.json"))
    files = {"{out}/" + f"{folder}/{name}": change_json(inputs.text(f"out/{folder}/{name}"), rng)}
    if name == "complete.json" and rng.random() < 0.5:
        # With the right checksum, so that its fields are read.
        files = {path: sign(text) for path, text in files.items()}
    if name != "complete.json":
        # The manifest has the checksums of the files. It is right here, so that the state is read.
        changed = next(iter(files.values())).encode("utf-8", "surrogateescape")
        manifest = with_file(inputs.text(f"out/{folder}/complete.json"), name, changed)
        files["{out}/" + f"{folder}/complete.json"] = manifest
    arguments = ("train", "--out", "{out}", "--resume", "--steps", "3", "--json")
    return Case("state", arguments, files)


FLAGS = (
    *("--context", "--batch", "--micro-batch", "--steps", "--epochs", "--freeze", "--blocks"),
    *("--model-config", "--hbm", "--dram", "--cxl", "--nvme", "--moments", "--dtype", "--seed"),
    *("--clip", "--machine", "--vary", "--explain", "--data", "--cache", "--eval-split"),
)
FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "rope_theta")


def change_command(inputs: Inputs, rng: random.Random) -> Case:
    arguments = ["plan", "{model}", *PLAN]
    for _ in range(rng.randrange(1, 3)):
        flag, value = rng.choice(FLAGS), rng.choice(ODD)
        text = value if isinstance(value, str) else json.dumps(value)
        # A program's arguments cannot contain a null character.
        text = text.replace("\x00", "0")
        if flag == "--model-config":
            text = f"{rng.choice(FIELDS)}={text}"
        arguments += [flag, text]
    return Case("command line", tuple(arguments))


KINDS: dict[str, Callable[[Inputs, random.Random], Case]] = {
    "config.json": change_config,
    "run.yaml": change_run_yaml,
    "plan.json": change_plan,
    "state": change_state,
    "command line": change_command,
}
