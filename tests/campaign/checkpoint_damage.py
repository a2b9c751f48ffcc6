"""Damage of whole kinds to the newest checkpoint of a stopped run, which is then resumed.

The older checkpoint is intact, so the resumed run must have the result of an undisturbed run. Only
a checkpoint of another run is refused.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from tests.campaign.flips import Flips, flip
from tests.campaign.forks import Ended
from tests.campaign.results import OK, Verdict

CASES = 200

SECTOR = 512

DAMAGE = (
    *("flip", "flip", "flip", "flip_many", "zero_sector", "truncate", "remove", "swap_file"),
    *("swap_checkpoints", "foreign"),
)


class CheckpointDamage(Flips):
    """Damages the newest checkpoint in each way in turn."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.other = folder / "other"
        self.other.mkdir()
        flags = [*self.runs.flags(self.other / "out"), "--seed", "1"]
        assert self.runs.start(flags, self.other).end().code == 0

    def run(self, seed: int, number: int) -> Verdict:
        rng = random.Random(f"{seed} {number}")
        here = self.runs.case
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(self.started, here)
        kind = DAMAGE[number % len(DAMAGE)]
        what = getattr(self, f"_{kind}")(here / "out", rng)
        ended = self.runs.resume(here / "out", here)
        verdict = self._judge_resume(kind, ended, here / "out")
        return Verdict(verdict.outcome, f"{kind} {what}: {verdict.detail}".rstrip(": "))

    def _judge_resume(self, kind: str, ended: Ended, out: Path) -> Verdict:
        if kind == "foreign":
            is_named = "the checkpoint was written by the run" in ended.errors
            right = ended.code == 1 and is_named and "Traceback" not in ended.errors
            return OK if right else Verdict("silent", f"{ended.code}: {ended.errors[-600:]}")
        return self.runs.check(ended, out)

    def _flip(self, out: Path, rng: random.Random) -> str:
        return flip(_draw_file(out, rng), rng)

    def _flip_many(self, out: Path, rng: random.Random) -> str:
        return "; ".join(flip(_draw_file(out, rng), rng) for _ in range(rng.randrange(2, 9)))

    def _zero_sector(self, out: Path, rng: random.Random) -> str:
        """A sector that was never written, or that the drive lost."""
        file = _draw_file(out, rng)
        content = bytearray(file.read_bytes())
        at = rng.randrange(len(content)) // SECTOR * SECTOR
        content[at : at + SECTOR] = bytes(len(content[at : at + SECTOR]))
        file.write_bytes(content)
        return f"{file.name} at {at}"

    def _truncate(self, out: Path, rng: random.Random) -> str:
        file = _draw_file(out, rng)
        nbytes = rng.randrange(file.stat().st_size)
        os.truncate(file, nbytes)
        return f"{file.name} to {nbytes} B"

    def _remove(self, out: Path, rng: random.Random) -> str:
        file = _draw_file(out, rng)
        file.unlink()
        return file.name

    def _swap_file(self, out: Path, rng: random.Random) -> str:
        """A file of the older checkpoint takes the place of the newer one's."""
        file = _draw_file(out, rng)
        older = min(out.glob("checkpoint-*")) / file.name
        shutil.copy(older, file)
        return file.name

    def _swap_checkpoints(self, out: Path, rng: random.Random) -> str:
        """The older checkpoint is copied over the newer one, under the newer one's name."""
        older, newer = min(out.glob("checkpoint-*")), max(out.glob("checkpoint-*"))
        shutil.rmtree(newer)
        shutil.copytree(older, newer)
        return newer.name

    def _foreign(self, out: Path, rng: random.Random) -> str:
        newer = max(out.glob("checkpoint-*"))
        shutil.rmtree(newer)
        shutil.copytree(self.other / "out" / newer.name, newer)
        return newer.name


def _draw_file(out: Path, rng: random.Random) -> Path:
    """Draw a file of the newest checkpoint, large ones more often."""
    folder = max(out.glob("checkpoint-*"))
    files = sorted(path for path in folder.iterdir() if path.is_file())
    files = [path for path in files if path.stat().st_size]
    return rng.choices(files, [path.stat().st_size ** 0.5 for path in files])[0]
