"""Right inputs of every command, as files in one directory, and commands that read them.

A fuzzed case is a command line and edits of some of these files. It runs on copies.
"""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock import records
from penstock.checkpoint.manifest import COMPLETE
from penstock.machine.presets import preset
from tests.fuzz.edits import Edit
from tests.fuzz.trainer_command import TRAINER, run_trainer, write_trainer
from tests.support.manifests import sign, with_file
from tests.train.runs import RESIDENT, Runs, run_command

PLAN = ("--context", "32", "--batch", "4", "--machine", "desktop-24gb", "--json")
TRAIN = ("--context", "32", "--batch", "4", *RESIDENT, "--steps", "1", "--json", "--no-self-check")

LORA = "r=4,alpha=8,dropout=0.1,save=lm_head"

CHECKPOINT = "out/checkpoint-000002"
ADAPTER_CHECKPOINT = "lora/checkpoint-000002"

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "plan": ("plan", "{model}", *PLAN),
    "train": ("train", "{model}", "--data", "{texts.jsonl}", "--out", "{here}/new", *TRAIN),
    "generate": ("generate", "{model}", "--prompt", "the quick", "--max-new", "3"),
    "generate file": ("generate", "{model}", "--file", "{prompts.jsonl}", "--max-new", "3"),
    "data": ("data", "show", "{texts.jsonl}", "--model", "{model}"),
    "fit": ("fit", "llama-3.1-8b", "--machine", "desktop-24gb", "--json"),
    "report": ("report", "{out}", "--json"),
    "compare": ("compare", "{out}", "{out}", "--json"),
    "resume": ("train", "--out", "{out}", "--resume", "--steps", "3", "--json"),
    "plan gpus": ("plan", "{model}", *PLAN, "--micro-batch", "2", "--gpus", "2,4"),
    "train lora": (
        "train",
        "{model}",
        "--data",
        "{texts.jsonl}",
        "--out",
        "{here}/new",
        *TRAIN,
        "--lora",
        LORA,
    ),
    "merge": ("merge", "{lora}", "--into", "{here}/merged"),
    "check": ("check", "{out}"),
    "machines": ("machines",),
    "doctor": ("doctor",),
    "store ls": ("store", "ls", "{disk}"),
    "store rm": ("store", "rm", "{disk}"),
    "bench": ("bench", "storage", "{disk}", "--size", "1MiB", "--passes", "1"),
    "profile": ("profile", "--out", "{here}/recording", "--", "true"),
}
"""Command lines that succeed. A part in braces is a file or directory of the inputs."""

DATA_FILES = ("texts.jsonl", "texts.json", "texts.csv", "texts.tsv", "texts.txt", "chats.jsonl",
              "texts.jsonl.gz")  # fmt: skip

CHECKPOINT_FILES = ("training_state.json", COMPLETE, "config.json", "run.yaml",
                    "tokenizer_config.json", "model.safetensors",
                    "optimizer.safetensors")  # fmt: skip
RUN_FILES = ("run.yaml", "metrics.jsonl", "plan.json", "config.json", "tokenizer.json")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "base_model.json")
RECORDINGS = ("observe.json", "samples.jsonl", "phases.jsonl", "events.jsonl")

FILES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "config.json": (
        ("model/config.json", "plan"),
        ("model/config.json", "train"),
        ("model/config.json", "generate"),
        ("out/config.json", "generate out"),
        ("model/generation_config.json", "generate"),
    ),
    "tokenizer": (
        ("model/tokenizer.json", "data"),
        ("model/tokenizer.json", "generate"),
        ("model/tokenizer_config.json", "data"),
        ("model/tokenizer_config.json", "train"),
    ),
    "weights": (
        ("model/model.safetensors", "train"),
        ("model/model.safetensors", "generate"),
        ("model/model.safetensors", "plan"),
    ),
    "run.yaml": (("run.yaml", "plan config"), ("run.yaml", "train config")),
    "plan.json": (("plan.json", "train plan"),),
    "machine.json": (("machine.json", "plan machine"), ("machine.json", "fit machine")),
    "data": (
        *((name, f"data {name}") for name in DATA_FILES),
        ("texts.jsonl", "train"),
        ("prompts.jsonl", "generate file"),
        ("prompts.jsonl", "train samples"),
    ),
    "resumed files": (
        *((f"{CHECKPOINT}/{name}", "resume") for name in CHECKPOINT_FILES),
        *((f"out/{name}", "resume") for name in RUN_FILES),
    ),
    "reports": (
        *((f"out/profile/{name}", "report") for name in RECORDINGS),
        *((f"out/profile/{name}", "compare") for name in RECORDINGS),
        ("out/metrics.jsonl", "report"),
    ),
    "adapters": (
        *((f"{ADAPTER_CHECKPOINT}/{name}", "resume lora") for name in ADAPTER_FILES),
        *((f"lora/{name}", "merge") for name in ADAPTER_FILES),
        ("lora/adapter_config.json", "generate lora"),
        ("lora/run.yaml", "resume lora"),
        ("model/config.json", "train lora"),
    ),
    "several GPUs": (
        ("ranks/run.yaml", "resume ranks"),  # rarely: each rank imports torch
        *[("ranks/run.yaml", "plan ranks")] * 3,
        *[("machines.json", "plan machines")] * 2,
    ),
    "checked files": (
        *((f"{CHECKPOINT}/{name}", "check") for name in CHECKPOINT_FILES),
        *((f"out/{name}", "check") for name in RUN_FILES),
    ),
    TRAINER: (("trainer.json", TRAINER),),
}
"""Files that are changed, with the command that reads them, by the name of the group."""


@dataclass(frozen=True)
class Case:
    """A command line, and edits of the files that it reads."""

    arguments: tuple[str, ...]
    edits: tuple[Edit, ...] = ()
    sealed: bool = True
    """Whether the manifest of a checkpoint has the sizes of its changed files, so that they are
    read and not just refused."""

    def to_json(self) -> dict[str, Any]:
        plain = {"file": "", "op": "", "path": (), "value": None, "at": 0, "length": 0, "text": ""}
        edits = [
            {k: v for k, v in asdict(edit).items() if k == "value" or v != plain[k]}
            for edit in self.edits
        ]
        return {"arguments": list(self.arguments), "edits": edits, "sealed": self.sealed}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Case:
        edits = (Edit(**{**e, "path": tuple(e.get("path", ()))}) for e in fields["edits"])
        return cls(tuple(fields["arguments"]), tuple(edits), fields.get("sealed", True))


def command_line(name: str) -> tuple[str, ...]:
    """Return the command line with this name, which may name a file that it reads."""
    if name in COMMANDS:
        return COMMANDS[name]
    command, _, what = name.partition(" ")
    if name == TRAINER:
        return (TRAINER, "{trainer.json}")
    if command == "generate":
        return ("generate", "{" + what + "}", *COMMANDS["generate"][2:])
    if command == "resume":
        return tuple(part.replace("{out}", "{" + what + "}") for part in COMMANDS["resume"])
    if what == "ranks":
        config = ("--config", "{ranks}/run.yaml", "--hbm", "auto", "--dram", "auto")
        return ("plan", "{model}", *config, *PLAN[4:])
    if what == "config":
        config = ("--config", "{run.yaml}")
        return (
            ("plan", "{model}", *config, "--machine", "desktop-24gb", "--hbm", "auto", "--json")
            if command == "plan"
            else (command, "{model}", *config, "--out", "{here}/new", "--steps", "1", "--json")
        )
    if what == "plan":
        return (*COMMANDS["train"][:6], "--plan", "{plan.json}", "--steps", "1", "--json")
    if what in ("machine", "machines"):
        arguments = list(COMMANDS["plan gpus" if what == "machines" else command])
        arguments[arguments.index("--machine") + 1] = "{" + what + ".json}"
        return tuple(arguments)
    if what == "samples":
        more = ("--sample-prompts", "{prompts.jsonl}", "--eval-split", "0.2", "--sample-new", "2")
        return (*COMMANDS["train"], *more)
    return ("data", "show", "{" + what + "}", "--model", "{model}")


class Inputs:
    """A directory of right inputs, which cases change copies of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> None:
        """Write all files. This trains a tiny model for two steps."""
        runs = Runs(self.folder)
        trained = runs.run(
            self.folder / "out", *RESIDENT, "--steps", "2", "--save-every", "1", "--profile", "2"
        )
        assert trained.code == 0, trained.errors
        shutil.copy(self.folder / "out/plan.json", self.folder / "plan.json")
        shutil.copy(self.folder / "out/run.yaml", self.folder / "run.yaml")
        records.save(preset("desktop-24gb"), self.folder / "machine.json")
        records.save(preset("board-8x4090"), self.folder / "machines.json")
        self._make_adapter(runs)
        self._make_ranks()
        write_trainer(self.folder / "trainer.json")
        _write_data(self.folder)
        assert run_trainer(self.folder / "trainer.json") == 0
        for name in ("plan", "generate"):
            line = [self._fill(part, self.folder) for part in COMMANDS[name]]
            ended = run_command(line)
            assert ended.code == 0, ended.errors

    def _make_adapter(self, runs: Runs) -> None:
        """Train an adapter of the model for two steps."""
        more = ("--steps", "2", "--save-every", "1", "--lora", LORA, "--no-self-check")
        trained = runs.run(self.folder / "lora", *RESIDENT, *more)
        assert trained.code == 0, trained.errors

    def _make_ranks(self) -> None:
        """Make the run one of two ranks, which have the files of one and another run.yaml."""
        ranks = self.folder / "ranks"
        shutil.copytree(self.folder / "out", ranks)
        for folder in (ranks, *ranks.glob("checkpoint-*")):
            file = folder / "run.yaml"
            file.write_text(file.read_text().replace("gpus: 1", "gpus: 2"))
            manifest = folder / COMPLETE
            if manifest.exists() and file.name in json.loads(manifest.read_text())["files"]:
                manifest.write_text(with_file(manifest.read_text(), file.name, file.read_bytes()))

    def read(self, file: str) -> bytes:
        return (self.folder / file).read_bytes()

    def prepare(self, case: Case, here: Path) -> list[str]:
        """Copy the files that a case uses, change them, and return its command line."""
        used = {edit.file.split("/")[0] for edit in case.edits}
        text = " ".join(case.arguments)
        for source in self.folder.iterdir():
            if source.name in used or "{" + source.name + "}" in text:
                copy = shutil.copytree if source.is_dir() else shutil.copy
                copy(source, here / source.name)
        for edit in case.edits:
            file = here / edit.file
            file.write_bytes(edit.apply(file.read_bytes()))
        if case.sealed:
            _seal(here, case.edits)
        return [self._fill(part, here) for part in case.arguments]

    def _fill(self, part: str, here: Path) -> str:
        # Not str.format: a fuzzed text may contain braces.
        part = part.replace("{here}", str(here))
        names = sorted((entry.name for entry in self.folder.iterdir()), key=len, reverse=True)
        for name in names:
            part = part.replace("{" + name + "}", str(here / name))
        return part


def _seal(here: Path, edits: Sequence[Edit]) -> None:
    """Make the manifest of a checkpoint right for its changed files, so that they are read."""
    for edit in edits:
        file = here / edit.file
        manifest = file.with_name(COMPLETE)
        if file == manifest:
            text = manifest.read_bytes().decode("utf-8", "surrogateescape")
            manifest.write_bytes(sign(text).encode("utf-8", "surrogateescape"))
        elif manifest.exists():
            fields = json.loads(manifest.read_text())
            if file.name in fields["files"]:
                manifest.write_text(with_file(manifest.read_text(), file.name, file.read_bytes()))


def _write_data(folder: Path) -> None:
    """Write the data in every format that needs no further package."""
    raw = (folder / "texts.jsonl").read_bytes()
    rows = [json.loads(line) for line in raw.splitlines()]
    (folder / "texts.json").write_text(json.dumps(rows))
    (folder / "texts.txt").write_text("\n".join(row["text"] for row in rows))
    (folder / "texts.jsonl.gz").write_bytes(gzip.compress(raw, mtime=0))
    for suffix, delimiter in ((".csv", ","), (".tsv", "\t")):
        with (folder / f"texts{suffix}").open("w", newline="") as file:
            writer = csv.writer(file, delimiter=delimiter)
            writer.writerow(["prompt", "completion"])
            writer.writerows([row["text"], row["text"][::-1]] for row in rows)
    turns = [
        [{"role": "user", "content": row["text"]}, {"role": "assistant", "content": "the fox"}]
        for row in rows
    ]
    for name, fields in (("chats", "messages"), ("prompts", "messages")):
        lines = [json.dumps({fields: turn[: 2 if name == "chats" else 1]}) for turn in turns[:4]]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
