"""metrics.jsonl, TensorBoard and Weights & Biases. Room: show."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.settings import Settings
from penstock.train.errors import MissingLoggerError
from penstock.train.events import Event, Listener, as_line

METRICS = "metrics.jsonl"

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}

_KEPT = ("step", "skipped", "eval", "sample", "save", "done")

HF_NAMES = {
    "step": {
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "lr": "train/learning_rate",
        "epoch": "train/epoch",
        "tokens_per_second": "train/tokens_per_second",
    },
    "eval": {"loss": "eval/loss"},
}
"""What Hugging Face's Trainer calls them."""


def check_loggers(names: Sequence[str]) -> None:
    """MissingLoggerError before the work and not after it."""
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise MissingLoggerError(name, _PACKAGES[name])


def open_loggers(settings: Settings) -> list[Listener]:
    kinds: dict[str, Callable[[Settings], Listener]]
    kinds = {"tensorboard": _TensorBoard, "wandb": _WeightsAndBiases}
    return [kinds[name](settings) for name in settings.logging.log]


class MetricsFile:
    """A line per event, written at once. A resumed run goes on in the same file."""

    def __init__(self, out: str | Path, *, after: int) -> None:
        path = Path(out) / METRICS
        _forget_later(path, after)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - for as long as the run

    def hear(self, event: Event) -> None:
        if event["event"] in _KEPT:
            plain = {name: value for name, value in event.items() if name != "tiers"}
            self._file.write(as_line({**plain, "time": round(time.time(), 3)}) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _forget_later(path: Path, after: int) -> None:
    """Lines of steps that a killed run had taken beyond its checkpoint: they come again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # torn by the kill
        if isinstance(event, dict) and event.get("step", after + 1) <= after:
            kept.append(line)
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(draft, path)


def named(event: Event) -> dict[str, float]:
    """An event's numbers under Hugging Face's names."""
    names = HF_NAMES.get(event["event"], {})
    return {hf: float(event[ours]) for ours, hf in names.items() if event.get(ours) is not None}


class _TensorBoard:
    def __init__(self, settings: Settings) -> None:
        module: Any = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(log_dir=str(Path(settings.checkpoint.out) / "runs"))

    def hear(self, event: Event) -> None:
        for name, value in named(event).items():
            self._writer.add_scalar(name, value, event["step"])

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, settings: Settings) -> None:
        module: Any = importlib.import_module("wandb")
        name = Path(settings.checkpoint.out).resolve().name
        self._run = module.init(
            project="penstock", name=name, dir=settings.checkpoint.out, resume="allow", id=None,
            config=settings.flat(),
        )  # fmt: skip

    def hear(self, event: Event) -> None:
        numbers = named(event)
        if numbers:
            self._run.log({**numbers, "train/global_step": event["step"]})

    def close(self) -> None:
        self._run.finish()
