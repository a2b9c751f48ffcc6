"""Log metrics to metrics.jsonl, TensorBoard and Weights & Biases."""

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
from penstock.train.events import Event, Listener, to_json_line

METRICS = "metrics.jsonl"

LOGGED = ("step", "skipped", "eval", "sample", "save", "done")
"""Events that metrics.jsonl contains."""

MEMORY = ("tiers", "host")
"""Fields of a step that metrics.jsonl leaves out: they rarely change from step to step."""

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
"""Names of the metrics in transformers' Trainer, by event and by our name."""

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


def check_loggers(names: Sequence[str]) -> None:
    """Raise MissingLoggerError, before the run starts, if a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise MissingLoggerError(name, _PACKAGES[name])


def open_loggers(settings: Settings) -> list[Listener]:
    """Open the experiment trackers that the settings name."""
    kinds: dict[str, Callable[[Settings], Listener]]
    kinds = {"tensorboard": _TensorBoard, "wandb": _WeightsAndBiases}
    return [kinds[name](settings) for name in settings.logging.log]


def hf_metrics(event: Event) -> dict[str, float]:
    """Return the numbers of an event under the names that transformers' Trainer uses."""
    names = HF_NAMES.get(event["event"], {})
    return {hf: float(event[ours]) for ours, hf in names.items() if event.get(ours) is not None}


class MetricsFile:
    """Appends one line per event to metrics.jsonl, and flushes it immediately.

    A resumed run continues the file after step `after`, that of its checkpoint.
    """

    def __init__(self, out: str | Path, *, after: int) -> None:
        path = Path(out) / METRICS
        _drop_later_lines(path, after)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open for the whole run

    def handle(self, event: Event) -> None:
        if event["event"] in LOGGED:
            logged = {name: value for name, value in event.items() if name not in MEMORY}
            self._file.write(to_json_line({**logged, "time": round(time.time(), 3)}) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _drop_later_lines(path: Path, after: int) -> None:
    """Drop the lines of steps after the checkpoint: the resumed run takes these steps again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # cut off when the run was killed
        if isinstance(event, dict) and event.get("step", after + 1) <= after:
            kept.append(line)
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(draft, path)


class _TensorBoard:
    def __init__(self, settings: Settings) -> None:
        module: Any = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(log_dir=str(Path(settings.checkpoint.out) / "runs"))

    def handle(self, event: Event) -> None:
        for name, value in hf_metrics(event).items():
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

    def handle(self, event: Event) -> None:
        metrics = hf_metrics(event)
        if metrics:
            self._run.log({**metrics, "train/global_step": event["step"]})

    def close(self) -> None:
        self._run.finish()
