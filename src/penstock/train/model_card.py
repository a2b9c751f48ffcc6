"""Write a model card: how the model in a directory was trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.durable_files import replace_file
from penstock.settings import Settings
from penstock.version import __version__

CARD = "README.md"

MARK = "<!-- This card was written by Penstock; remove this line to keep your changes. -->"
"""Marks a card that Penstock wrote. A longer run may replace it."""

SHOWN = (
    *("context", "batch", "optimizer", "lr", "min_lr", "schedule", "warmup", "betas", "momentum"),
    *("nesterov", "weight_decay", "clip", "dtype", "moments", "freeze", "lora", "seed"),
)
"""Settings that the card lists."""

SHOWN_IF_SET = ("label_smoothing", "neftune_noise_alpha", "quantize")
"""Settings that the card lists unless they are off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """What a card says about the outcome of a run."""

    steps: int
    loss: float | None = None
    """Training loss of the last step."""
    eval_loss: float | None = None
    """Loss of the last evaluation."""


def write_model_card(folder: Path, settings: Settings, result: TrainingResult) -> None:
    """Write the card into the directory, unless the user's own card is there."""
    path = folder / CARD
    if not path.exists() or MARK in path.read_text(encoding="utf-8", errors="replace"):
        replace_file(path, model_card(settings, result))


def model_card(settings: Settings, result: TrainingResult) -> str:
    """Return the text of the card. Paths on the user's machine are not part of it."""
    name = Path(settings.checkpoint.out).resolve().name
    base = settings.model.model
    is_local = _is_local(base)
    shown = Path(base).name if is_local else base
    lora = bool(settings.model.lora)
    front = [f"library_name: {'peft' if lora else 'transformers'}", "tags:", "- penstock"]
    front += ["- lora"] if lora else []
    front += [] if is_local else [f"base_model: {base}"]
    origin = "from random weights of" if settings.model.init == "random" else "from"
    return "\n".join([
        "---", *front, "---", "", MARK, "",
        f"# {name}", "",
        f"{'A LoRA adapter was trained' if lora else 'All parameters were fine-tuned'} {origin} "
        f"{shown} with Penstock {__version__}, on {_data_names(settings)}.", "",
        "```python", *_example(lora), "```", "",
        "| | |", "|---|---|", *_rows(settings, result), "",
    ])  # fmt: skip


def _is_local(name: str) -> bool:
    """Return whether a model or data set is on this machine, or was when the run started."""
    return Path(name).exists() or Path(name).is_absolute() or name.startswith(".")


def _example(lora: bool) -> list[str]:
    """Return the lines that load the model."""
    factory = "AutoPeftModelForCausalLM" if lora else "AutoModelForCausalLM"
    imports = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    if lora:
        imports = [f"from peft import {factory}", "from transformers import AutoTokenizer"]
    return [
        *imports, "",
        f'model = {factory}.from_pretrained("path/to/this/directory")',
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")',
    ]  # fmt: skip


def _rows(settings: Settings, result: TrainingResult) -> list[str]:
    rows = [("steps", f"{result.steps:,}")]
    rows += [("training loss, last step", f"{result.loss:.4f}")] if result.loss is not None else []
    if result.eval_loss is not None:
        rows.append(("evaluation loss, at the end", f"{result.eval_loss:.4f}"))
    values = settings.flat()
    for name in (*SHOWN, *SHOWN_IF_SET):
        value = values[name]
        if value not in (None, (), "") and (value or name not in SHOWN_IF_SET):
            text = ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value}"
            rows.append((name.replace("_", " "), text))
    return [f"| {name} | {text} |" for name, text in rows]


def _data_names(settings: Settings) -> str:
    """Name data sets of the Hub; files stay private."""
    public = [name for name in settings.data.data if not _is_local(name)]
    private = len(settings.data.data) - len(public)
    names = [*public, *([f"{private} local file{'s' * (private > 1)}"] if private else [])]
    return " and ".join(names) or "data that was not recorded"
