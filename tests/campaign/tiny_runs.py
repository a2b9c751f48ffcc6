"""Tiny runs of `penstock train` in forks, and what must be equal in all that are equal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from penstock.checkpoint.manifest import step_of
from tests.campaign.forks import Ended, Fork, Limits, import_what, penstock
from tests.campaign.results import OK, Verdict
from tests.train.runs import (
    RESIDENT,
    SETTINGS,
    TIGHT,
    contents,
    make_model,
    make_texts,
    run_command,
)

STEPS = 6

LIMITS = Limits(cpu_seconds=60, memory=None, wall_seconds=300)


class TinyRuns:
    """A tiny model, its data, and an uninterrupted run to compare others with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.data = folder / "model", folder / "texts.jsonl"
        self.whole = folder / "whole"
        self.case = folder / "case"
        import_what(self._make, folder)
        self.expected = contents(self.whole)
        self.losses = losses(self.whole)

    def _make(self) -> None:
        make_model(self.model)
        make_texts(self.data)
        for out in (folder := self.folder / "warm-up", self.whole):
            ended = run_command(self.flags(out))
            assert ended.code == 0, ended.errors
        shutil.rmtree(folder)

    def flags(self, out: Path, *, disk: Path | None = None) -> list[str]:
        """Return the command line of a run, which keeps states on a disk if there is one."""
        budgets = RESIDENT if disk is None else (*TIGHT, "--nvme", f"{disk}:64MiB")
        return ["train", str(self.model), "--data", str(self.data), "--out", str(out), *SETTINGS,
                "--cache", str(out.parent / "cache"), "--steps", str(STEPS), "--save-every", "2",
                *budgets]  # fmt: skip

    def start(
        self, arguments: list[str], here: Path, before: Callable[[], object] | None = None
    ) -> Fork:
        """Start a command in a fork, after a call of `before` in the fork."""

        def command() -> int:
            if before is not None:
                before()
            return penstock(arguments)()

        return Fork(command, here, LIMITS)

    def resume(self, out: Path, here: Path, *, disk: Path | None = None) -> Ended:
        """Resume a run with the settings that it has saved; start it if it has not saved any."""
        known = (out / "run.yaml").exists() or any(out.glob("checkpoint-*"))
        arguments = ["train", "--out", str(out), "--resume", "--json"]
        if not known:
            arguments = [*self.flags(out, disk=disk), "--resume"]
        return self.start(arguments, here).end()

    def check(self, ended: Ended, out: Path, saved: int = 0) -> Verdict:
        """Judge a resumed run: it ends, and its result is that of the uninterrupted run.

        `saved` is the newest step whose checkpoint was reported as saved before.
        """
        if ended.hung:
            return Verdict("hang", ended.errors[-600:])
        if ended.code not in (0, 1, 2) or "Traceback" in ended.errors:
            return Verdict("traceback", f"exit code {ended.code}: {ended.errors[-1500:]}")
        if ended.code != 0:
            return Verdict("lost", f"exit code {ended.code}: {ended.errors[-600:]}")
        resumed = [line for line in ended.errors.splitlines() if line.startswith("resuming from")]
        step = step_of(Path(resumed[-1].split()[-1]).name) if resumed else 0
        if (step or 0) < saved:
            return Verdict("lost", f"step {saved} was saved, but step {step} was resumed")
        if contents(out) != self.expected:
            return Verdict("silent", "the weights or states differ from an uninterrupted run")
        if losses(out) != self.losses:
            return Verdict("silent", f"metrics.jsonl has {losses(out)}, not {self.losses}")
        return OK


def losses(out: Path) -> list[tuple[int, float]]:
    """Return the steps of metrics.jsonl in the order they are listed, and their losses."""
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(event["step"], event["loss"]) for event in events if event["event"] == "step"]


def saved_step(output: str) -> int:
    """Return the newest step that a run's output reports as saved."""
    newest = 0
    for line in output.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # cut off by the kill
        if event.get("event") == "save":
            newest = max(newest, event["step"])
    return newest
