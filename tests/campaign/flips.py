"""Bits that a disk flips in checkpoints, in a store while a run uses it, and in token caches.

A run that reads the bit must end with a message, or have the result of an undisturbed run: because
it takes an older checkpoint, or because it makes the data again.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from tests.campaign.forks import Ended, Fork, penstock
from tests.campaign.results import OK, Verdict
from tests.campaign.tiny_runs import LIMITS, TinyRuns, saved_step

CASES = 200

PLACES = ("checkpoint", "checkpoint", "store", "store", "cache")


class Flips:
    """Flips a bit in each place in turn."""

    def __init__(self, folder: Path) -> None:
        self.runs = TinyRuns(folder)
        self.started = folder / "started"
        self._stop_after_save()

    def _stop_after_save(self) -> None:
        """Keep the files of a run that was killed between its second save and its last."""
        while not (self.started / "out/checkpoint-000004").exists():
            shutil.rmtree(self.started, ignore_errors=True)
            self.started.mkdir()
            fork = Fork(penstock(self.runs.flags(self.started / "out")), self.started, LIMITS)
            while saved_step((self.started / "stdout.txt").read_text()) < 4:
                if fork.wait(0.001) is not None:
                    break
            fork.kill()
            assert fork.end().code < 0, "the run ended before it was killed"

    def run(self, seed: int, number: int) -> Verdict:
        rng = random.Random(f"{seed} {number}")
        shutil.rmtree(self.runs.case, ignore_errors=True)
        here = self.runs.case
        place = PLACES[number % len(PLACES)]
        what, ended, out = getattr(self, f"_flip_{place}")(here, rng)
        verdict = self._judge(ended, out)
        return Verdict(verdict.outcome, f"{what}: {verdict.detail}".rstrip(": "))

    def _flip_checkpoint(self, here: Path, rng: random.Random) -> tuple[str, Ended, Path]:
        shutil.copytree(self.started, here)
        out = here / "out"
        files = [path for path in max(out.glob("checkpoint-*")).iterdir() if path.is_file()]
        file = rng.choices(files, [path.stat().st_size ** 0.5 for path in files])[0]
        what = flip(file, rng)
        return what, self.runs.resume(out, here), out

    def _flip_cache(self, here: Path, rng: random.Random) -> tuple[str, Ended, Path]:
        here.mkdir()
        shutil.copytree(self.started / "cache", here / "cache")
        files = [path for path in (here / "cache").rglob("*") if path.is_file()]
        files = [path for path in files if path.stat().st_size]
        what = flip(rng.choice(files), rng)
        out = here / "out"
        return what, self.runs.start(self.runs.flags(out), here).end(), out

    def _flip_store(self, here: Path, rng: random.Random) -> tuple[str, Ended, Path]:
        here.mkdir()
        (here / "disk").mkdir()
        out, told = here / "out", here / "flipped.txt"
        batch = rng.randrange(1, 6)
        command = self.runs.flags(out, disk=here / "disk")
        ended = self.runs.start(command, here, lambda: flip_store(batch, rng, told)).end()
        return f"store, before batch {batch}: {_read(told)}", ended, out

    def _judge(self, ended: Ended, out: Path) -> Verdict:
        """Accept the right result, and a message that says where the damage is."""
        if ended.code == 1 and "Traceback" not in ended.errors:
            lines = [line for line in ended.errors.splitlines() if line.startswith("error: ")]
            named = bool(lines) and ("/" in lines[-1] or "bytes" in lines[-1])
            return OK if named else Verdict("silent", f"no message: {ended.errors[-600:]}")
        return self.runs.check(ended, out)


def flip(file: Path, rng: random.Random) -> str:
    """Flip a bit of a file; return which."""
    content = bytearray(file.read_bytes())
    at, bit = rng.randrange(len(content)), rng.randrange(8)
    content[at] ^= 1 << bit
    file.write_bytes(content)
    return f"{file.parent.name}/{file.name}, bit {bit} of byte {at}"


def flip_store(batch: int, rng: random.Random, told: Path) -> None:
    """Let the engine of this process flip a bit of its store before the step of a batch."""
    from penstock.engine.engine import Engine
    from tests.support.bit_flips import flip_any_bit

    plain = Engine.step

    def step(self: Engine, given: Any) -> Any:
        store = self._memory.tiers.store
        if self.batches == batch and store is not None and not told.exists():
            self.finish()
            extent = rng.choice(list(self._memory.tiers._extents.values()))
            flip_any_bit(store, extent, rng)
            told.write_text(extent.name)
        return plain(self, given)

    Engine.step = step  # type: ignore[method-assign]


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else "no store"
