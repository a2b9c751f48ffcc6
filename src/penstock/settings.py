"""Define every setting of a training run once: its type, default, checks and help text.

`Settings` groups the settings by concern. The same fields drive the flags of `penstock train` and
`penstock plan`, the keyword arguments of `penstock.prepare`, and run.yaml. Field names are unique
across the groups, so a setting can be given by its name alone: `Settings.of({"lr": 1e-5})`.
"""

# ruff: noqa: RUF009 - option() calls dataclasses.field()

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from penstock.durable_files import replace_file
from penstock.errors import RecordError, SettingsError
from penstock.lora_options import LoraOptions
from penstock.optimizer_options import DEFAULTS, check_known, check_values
from penstock.packed_weights import Quantization
from penstock.records import Json, from_json, to_json
from penstock.roles import Dtype, Moments, OptimizerName

RUN_FILE = "run.yaml"
"""Name of the file in the output directory that records the settings of a run."""

RUN_ID = "run_id"
"""Name in that file of the run's ID, which is not a setting: another run never takes it over."""

Schedule = Literal["cosine", "linear", "constant", "wsd"]

Overlong = Literal["auto", "truncate", "drop", "split"]

DEFAULT_CONTEXT = 4096
"""Context where nothing is known about the data, and the longest one chosen for plain text."""

DEFAULT_BATCH = 8
"""Batch where nothing is known about the data; the per-device default of transformers' Trainer."""

LARGEST_CONTEXT = (1 << 31) - 1
"""Positions are 32-bit numbers in attention kernels."""

LARGEST_BATCH = 1 << 16
"""Planning takes time in proportion to the micro-batches; published batches are below 20,000."""

LARGEST_GPUS = 1024
"""Every GPU needs a micro-batch of each step; published runs of this kind use up to 8."""

LARGEST_WEIGHT = 1000
"""Largest weight of a source of data: its documents are listed as often."""


def option(help_: str, default: Any = MISSING) -> Any:
    """Declare a setting with its help text and default value."""
    if isinstance(default, Mapping):
        return field(default_factory=lambda: dict(default), metadata={"help": help_})
    return field(default=default, metadata={"help": help_})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """The model to train, and how it computes."""

    model: str = option("Model directory, or a Hugging Face model ID.", "")
    revision: str | None = option("Model revision on the Hub: a branch, tag or commit.", None)
    trust_remote_code: bool = option("Allow code from the model repository to run.", False)
    model_config: Json = option("Override a model config value, as KEY=VALUE. Repeatable.", {})
    init: Literal["pretrained", "random"] = option(
        "Start from pretrained or from random weights.", "pretrained"
    )
    dtype: Dtype = option(
        "Data type that weights and activations are computed in; fp32 is for comparing with a "
        "reference and for debugging.",
        "bf16",
    )
    freeze: tuple[str, ...] = option(
        "Do not train tensors whose names match this pattern, e.g. `model.embed_tokens.*`. "
        "Repeatable.",
        (),
    )
    lora: tuple[str, ...] = option(
        "Train a LoRA adapter instead of the weights, e.g. `r=16,alpha=32,targets=all-linear`. "
        "Also exclude=, layers=, save=, dropout=, bias=, init= and rslora; names are joined by +. "
        "Needs the package peft.",
        (),
    )
    quantize: Quantization | None = option(
        "With an adapter: store the frozen weights of linear layers as 4-bit numbers, `nf4` as in "
        "QLoRA or `int4`. They take 0.52 bytes per weight instead of 2.",
        None,
    )
    blocks: str | None = option(
        "Module that holds the transformer layers, e.g. `model.layers`, if it is not found "
        "automatically.",
        None,
    )
    self_check: bool = option(
        "Before memory is allocated, train a tiny copy of the model and compare with plain "
        "transformers and PyTorch.",
        True,
    )

    def __post_init__(self) -> None:
        if not isinstance(self.model_config, Mapping):
            raise SettingsError(
                "model_config", f"must map names to values, got {self.model_config!r}"
            )
        if self.lora_options is not None and self.freeze:
            raise SettingsError(
                "freeze", "cannot be combined with lora, which trains nothing but the adapter"
            )

    @property
    def lora_options(self) -> LoraOptions | None:
        """The options of the adapter; None to train the weights."""
        return LoraOptions.parse(self.lora) if self.lora else None


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """The training data, and how documents become sequences."""

    data: tuple[str, ...] = option(
        "Training data: a file, a directory or a Hugging Face dataset ID. Repeatable.", ()
    )
    data_weights: tuple[float, ...] = option(
        "Weight of each --data, separated by commas: how often an epoch has its documents, e.g. "
        "`1,0.5` (default: once).",
        (),
    )
    columns: tuple[str, ...] = option(
        "Columns of the data that have other names, as NAME=COLUMN separated by commas, e.g. "
        "`prompt=question,completion=answer`.",
        (),
    )
    streaming: bool = option(
        "Read datasets from the Hub as a stream instead of downloading them first.", False
    )
    context: int | None = option(
        "Sequence length in tokens (default: chosen for the lengths of the documents, at most the "
        "model's limit).",
        None,
    )
    overlong: Overlong = option(
        "How to handle documents longer than the context; `auto` splits plain texts and truncates "
        "all others.",
        "auto",
    )
    skip_bad_lines: bool = option("Skip invalid lines in the data instead of stopping.", False)
    cache: str | None = option("Directory to cache tokenized data in.", None)

    def __post_init__(self) -> None:
        if self.context is not None:
            _require_at_least(self, context=2)
            _require_at_most(self, context=LARGEST_CONTEXT)
        number = len(self.data_weights)
        wrong = number not in (0, len(self.data)) and bool(self.data)
        rule = f"must be one number for each of the {len(self.data)} sources of --data"
        _refuse("data_weights", wrong, rule, list(self.data_weights))
        wrong = not all(0 <= weight <= LARGEST_WEIGHT for weight in self.data_weights)
        rule = f"must be from 0 to {LARGEST_WEIGHT}"
        _refuse("data_weights", wrong, rule, list(self.data_weights))
        _ = self.column_names

    @property
    def column_names(self) -> dict[str, str]:
        """Column of the data for each name that has another column."""
        pairs = [text.partition("=") for text in self.columns]
        wrong = not all(sign and name.strip() and column.strip() for name, sign, column in pairs)
        rule = "must have the form prompt=question,completion=answer"
        _refuse("columns", wrong, rule, ",".join(self.columns))
        names = [name.strip() for name, _, _ in pairs]
        twice = len(set(names)) < len(names)
        _refuse("columns", twice, "must give each name once", ",".join(self.columns))
        return {name: column.strip() for name, (_, _, column) in zip(names, pairs, strict=True)}

    @property
    def chosen_context(self) -> int:
        """The context, once it is given or chosen."""
        assert self.context is not None, "choose a context first"
        return self.context


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSettings:
    """The length of the run, its batches, and its optimizer settings."""

    batch: int | None = option(
        "Number of sequences per optimizer step (default: chosen so that an epoch has about 50 "
        "steps, with at most 32,768 tokens each).",
        None,
    )
    micro_batch: str = option("Number of sequences computed together, or `auto`.", "auto")
    epochs: float | None = option(
        "Number of passes over the data (default: 1 unless --steps is given).", None
    )
    steps: int | None = option("Number of optimizer steps in the run.", None)
    lr: float = option("Peak learning rate.", 1e-5)
    min_lr: float = option("Learning rate at the end of the run, in place of 0.", 0.0)
    schedule: Schedule = option(
        "How the learning rate changes after warmup; `wsd` is constant until it decays linearly.",
        "cosine",
    )
    decay: float | None = option(
        "Length of the decay of `--schedule wsd`: a fraction of all steps if below 1, otherwise a "
        "number of steps (default: 0.1).",
        None,
    )
    warmup: float = option(
        "Warmup length: a fraction of all steps if below 1, otherwise a number of steps.", 0.03
    )
    optimizer: OptimizerName = option(
        "The optimizer. `muon` updates the matrices of layers, and AdamW everything else.", "adamw"
    )
    betas: tuple[float, ...] = option(
        "Betas of AdamW, Lion and Muon's AdamW (default: 0.9,0.95; 0.9,0.99 for Lion).", ()
    )
    momentum: float | None = option(
        "Momentum of SGD (default: 0, which needs no memory) and Muon (default: 0.95).", None
    )
    nesterov: bool | None = option(
        "Use Nesterov momentum (default: off for SGD, on for Muon).", None
    )
    weight_decay: float = option("Weight decay; norms and biases are not decayed.", 0.1)
    clip: float = option("Maximum gradient norm; 0 disables clipping.", 1.0)
    label_smoothing: float = option(
        "Share of each target's probability that is spread over the whole vocabulary, e.g. 0.1; "
        "evaluation uses it too.",
        0.0,
    )
    neftune_noise_alpha: float = option(
        "Strength of NEFTune's noise on embeddings during training, e.g. 5; 0 disables it.", 0.0
    )
    on_nonfinite: Literal["raise", "skip"] = option(
        "Stop or skip the step when the loss or a gradient is NaN or infinite.", "raise"
    )
    deterministic: bool = option(
        "Use only kernels that give the same bits in every run; without it, a run cannot be "
        "reproduced bit for bit.",
        True,
    )
    seed: int = option("Random seed for data order, dropout, noise and random weights.", 0)

    def __post_init__(self) -> None:
        _require_at_least(self, seed=0, lr=0, warmup=0, weight_decay=0, clip=0)
        _require_at_least(self, neftune_noise_alpha=0)
        if self.batch is not None:
            _require_at_least(self, batch=1)
            _require_at_most(self, batch=LARGEST_BATCH)
        _require_positive(self, "steps", "epochs", "decay")
        smoothing = self.label_smoothing
        rule = "must be at least 0 and below 1"
        _refuse("label_smoothing", not 0 <= smoothing < 1, rule, smoothing)
        _refuse(
            "min_lr",
            not 0 <= self.min_lr <= self.lr,
            f"must be from 0 to lr={self.lr:g}",
            self.min_lr,
        )
        _refuse(
            "decay",
            self.decay is not None and self.schedule != "wsd",
            f"needs the schedule wsd, not {self.schedule}",
            self.decay,
        )
        if self.steps is not None and self.epochs is not None:
            raise SettingsError("steps", "cannot be combined with epochs; give one of them")
        pair = len(self.betas) in (0, 2) and all(0 <= beta < 1 for beta in self.betas)
        _refuse(
            "betas", not pair, "must be two numbers of at least 0 and below 1", list(self.betas)
        )
        if self.momentum is not None:
            _require_at_least(self, momentum=0)
        digits = self.micro_batch.isascii() and self.micro_batch.isdigit()
        # Python refuses to convert thousands of digits.
        short = len(self.micro_batch) <= len(str(LARGEST_BATCH))
        valid = self.micro_batch == "auto" or (digits and short and int(self.micro_batch) > 0)
        rule = f"must be `auto` or a number from 1 to {LARGEST_BATCH}"
        _refuse("micro_batch", not valid, rule, _shorten(self.micro_batch))

    @property
    def chosen_batch(self) -> int:
        """The batch, once it is given or chosen."""
        assert self.batch is not None, "choose a batch first"
        return self.batch

    @property
    def micro_batch_size(self) -> int | None:
        """Number of sequences in a micro-batch; None for `auto`."""
        return None if self.micro_batch == "auto" else int(self.micro_batch)

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """Values of all options of the optimizer.

        Raises SettingsError for options that the optimizer does not have, or that exclude each
        other.
        """
        given = {"betas": self.betas or None, "momentum": self.momentum, "nesterov": self.nesterov}
        set_here = {name: value for name, value in given.items() if value is not None}
        check_known(self.optimizer, set_here)
        options = {"lr": self.lr, **DEFAULTS[self.optimizer], "weight_decay": self.weight_decay}
        check_values(self.optimizer, options | set_here)
        return options | set_here


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySettings:
    """The GPUs, the memory budget of each tier, the format of the moments, and checks of NVMe."""

    gpus: int = option(
        "Number of GPUs to train on, with one process each. The result does not depend on it.", 1
    )
    transport: Literal["auto", "shared", "collective"] = option(
        "How several GPUs reach each other's data: through host memory (`shared`), by collective "
        "calls (`collective`), or `auto` for the faster way.",
        "auto",
    )
    hbm: str = option(
        "Memory budget of each GPU, e.g. `22GiB`, or `auto` (free memory less a reserve).", "auto"
    )
    dram: str = option("DRAM budget, e.g. `40GiB`, or `auto` (free memory less a reserve).", "auto")
    cxl: str = option("CXL memory budget, e.g. `64GiB`, or `auto` (all free CXL memory).", "auto")
    nvme: tuple[str, ...] = option(
        "NVMe budget as PATH:SIZE, e.g. `/mnt/nvme:400GiB`, or PATH for all that is free there. "
        "Repeatable.",
        (),
    )
    moments: Moments = option(
        "Storage format of the optimizer's moments: fp32 is exact; bf16 and int8 use less memory.",
        "fp32",
    )
    store_checksums: bool = option(
        "Keep a checksum of everything written to NVMe, and check it on every read.", True
    )
    plan: str | None = option(
        "Plan file written by `penstock plan -o`; replaces the memory budgets.", None
    )

    def __post_init__(self) -> None:
        _require_at_least(self, gpus=1)
        _require_at_most(self, gpus=LARGEST_GPUS)

    @property
    def budgets(self) -> dict[str, Any]:
        """The size of each tier as the user wrote it."""
        return {name: getattr(self, name) for name in BUDGETS}


BUDGETS = ("hbm", "dram", "cxl", "nvme")


HUB_MODEL = "model"
"""Directory of the trained model in the output directory, with `hub_layout`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSettings:
    """The output directory, and when checkpoints are saved."""

    out: str = option("Output directory for checkpoints, metrics and the trained model.", "")
    save_every: str = option(
        "Interval between checkpoints: a duration such as `30min`, or a number of steps.", "30min"
    )
    keep: int = option("Number of checkpoints to keep.", 2)
    keep_resumable: int = option(
        "Number of checkpoints that keep their optimizer states, at most --keep. If the newest one "
        "is damaged, --resume continues from an older one.",
        2,
    )
    save_weights_only: bool = option(
        "Save checkpoints without optimizer states; such a run cannot be resumed.", False
    )
    hub_layout: bool = option(
        "Put the trained model into OUT/model, which contains nothing else and can be uploaded.",
        False,
    )

    def __post_init__(self) -> None:
        _require_at_least(self, keep=1, keep_resumable=1)
        parse_interval(self.save_every)

    @property
    def model_directory(self) -> Path:
        """Directory of the trained model."""
        return Path(self.out) / HUB_MODEL if self.hub_layout else Path(self.out)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """The held-out data, and the prompts to answer during training."""

    eval_data: tuple[str, ...] = option("Held-out data for evaluation. Repeatable.", ())
    eval_split: float | None = option("Fraction of the data to hold out for evaluation.", None)
    eval_every: int | None = option(
        "Number of steps between evaluations (default: only before and after training).", None
    )
    save_best: bool = option("Keep the model with the lowest evaluation loss in OUT/best.", False)
    sample_prompts: str | None = option(
        "JSON Lines file of prompts that the model answers at each evaluation.", None
    )
    sample_new: int = option("Maximum number of new tokens per sample answer.", 64)

    def __post_init__(self) -> None:
        _require_at_least(self, sample_new=1)
        _require_positive(self, "eval_every")
        split = self.eval_split
        outside = split is not None and not 0 < split < 1
        _refuse("eval_split", outside, "must be above 0 and below 1", split)
        both = bool(self.eval_data) and self.eval_split is not None
        _refuse("eval_split", both, "cannot be combined with eval_data", self.eval_split)
        if self.save_best and not self.eval_data and self.eval_split is None:
            raise SettingsError(
                "save_best", "needs data to evaluate on; give eval_data or eval_split, too"
            )


TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
"""Experiment trackers that `--log` takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingSettings:
    """The experiment trackers that receive metrics, in addition to metrics.jsonl."""

    log: tuple[str, ...] = option(
        "Experiment trackers, separated by commas: `tensorboard`, `wandb`, `trackio`, `mlflow`.", ()
    )
    log_project: str | None = option(
        "Project, or MLflow experiment, of the run in trackers (default: their environment "
        "variable, such as WANDB_PROJECT, or `penstock`).",
        None,
    )
    log_name: str | None = option(
        "Name of the run in trackers (default: their environment variable, or the name of --out).",
        None,
    )

    def __post_init__(self) -> None:
        unknown = [name for name in self.log if name not in TRACKERS]
        _refuse(
            "log", bool(unknown), f"must be one or more of {', '.join(TRACKERS)}", ",".join(unknown)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """All settings of a run, grouped by concern."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    logging: LoggingSettings = field(default_factory=LoggingSettings)

    @classmethod
    def of(cls, values: Mapping[str, Any], *, source: str = "") -> Settings:
        """Build settings from values by field name; all others have their defaults.

        Raises SettingsError, which names the field and, if given, the `source` of the values.
        """
        return cls().replace(values, source=source)

    def replace(self, values: Mapping[str, Any], *, source: str = "") -> Self:
        """Copy the settings with new values, given by field name."""
        by_group: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            by_group.setdefault(_group_of(name, values, source), {})[name] = _convert(name, value)
        changed = {
            group: _replace_group(getattr(self, group), new, source)
            for group, new in by_group.items()
        }
        return dataclasses.replace(self, **changed)

    def with_assumed_sizes(self, max_context: int | None) -> Self:
        """Return the settings with a context and a batch, for callers that have no data.

        Args:
            max_context: Number of positions of the model; None if it has no limit.
        """
        assumed = {
            "context": min(DEFAULT_CONTEXT, max_context or DEFAULT_CONTEXT),
            "batch": DEFAULT_BATCH,
        }
        given = {"context": self.data.context, "batch": self.schedule.batch}
        return self.replace({n: v for n, v in assumed.items() if given[n] is None})

    def flat(self) -> dict[str, Any]:
        """All values by field name, without the groups."""
        return {name: getattr(getattr(self, group), name) for name, group in GROUP_OF.items()}


GROUPS: Mapping[str, Any] = get_type_hints(Settings)
"""Class of each group, by the group's name."""

GROUP_OF: Mapping[str, str] = {
    f.name: group for group, cls in GROUPS.items() for f in dataclasses.fields(cls)
}
"""Name of the group that each field belongs to, by the field's name."""

TYPES: Mapping[str, Any] = {
    name: hint for cls in GROUPS.values() for name, hint in get_type_hints(cls).items()
}
"""Type of each field, by the field's name."""

AFFECTS_RESULT = (
    *("context", "batch", "moments", "lr", "min_lr", "schedule", "decay", "warmup"),
    *(
        "optimizer",
        "betas",
        "momentum",
        "nesterov",
        "weight_decay",
        "clip",
        "label_smoothing",
        "neftune_noise_alpha",
    ),
    *("dtype", "freeze", "model_config", "deterministic", "seed", "overlong", "on_nonfinite"),
    *("columns", "data_weights", "lora", "quantize"),
)
"""Settings that can change the trained weights. A resume reports those that differ."""


def settings_fields(names: Iterable[str] | None = None) -> list[dataclasses.Field[Any]]:
    """List the fields of all groups, or the named ones."""
    by_name = {f.name: f for cls in GROUPS.values() for f in dataclasses.fields(cls)}
    return [by_name[name] for name in (by_name if names is None else names)]


# Intervals between checkpoints.

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_SECONDS = {
    **dict.fromkeys(("s", "sec"), 1),
    **dict.fromkeys(("m", "min"), _MINUTE),
    **dict.fromkeys(("h", "hour", "hours"), _HOUR),
    "d": _DAY,
}
_INTERVAL = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*")


@dataclass(frozen=True, slots=True)
class Interval:
    """A number of steps or a number of seconds; exactly one of them is set."""

    steps: int | None = None
    seconds: float | None = None

    def is_due(self, *, step: int, last: int, seconds: float) -> bool:
        """Return whether to save at `step`, if the last save was at step `last` and so long ago.

        A number of steps means its multiples, wherever a run was resumed.
        """
        if self.steps is not None:
            return step // self.steps > last // self.steps
        assert self.seconds is not None
        return seconds >= self.seconds and step > last


def parse_interval(text: str, field: str = "save_every") -> Interval:
    """Parse a duration such as `30min`, `90s` or `2h`, or a number of steps."""
    match = _INTERVAL.fullmatch(text.lower())
    if match and not match[2] and match[1].isdigit() and int(match[1]) > 0:
        return Interval(steps=int(match[1]))
    if match and match[2] in _SECONDS and float(match[1]) > 0:
        return Interval(seconds=float(match[1]) * _SECONDS[match[2]])
    raise SettingsError(
        field, f"must be a duration such as 30min, 90s or 2h, or a number of steps, got {text!r}"
    )


# Layers: defaults, the run.yaml of a resumed run, --config, the command line.

Layer = Mapping[str, Any]
"""Values from one source, by field name."""

_EXCLUDES: Mapping[str, Sequence[str]] = {
    "steps": ("epochs",),
    "epochs": ("steps",),
    "eval_data": ("eval_split",),
    "eval_split": ("eval_data",),
    "plan": BUDGETS,
    **dict.fromkeys(BUDGETS, ("plan",)),
}
"""A value in a stronger layer removes the fields that exclude it from the weaker layers."""


def merge_layers(layers: Sequence[tuple[str, Layer]]) -> Settings:
    """Merge layers, each with the name of its source, into settings. The last layer wins."""
    merged: dict[str, Any] = {}
    for source, layer in layers:
        # Check each layer by itself, so that the message names the file with the wrong value.
        Settings.of(layer, source=source)
        values = {name: _convert(name, value) for name, value in layer.items()}
        _refuse_plan_with_budgets(values, source)
        for name, value in values.items():
            if value not in (None, (), []):
                for excluded in _EXCLUDES.get(name, ()):
                    if excluded not in values:
                        merged.pop(excluded, None)
            if name == "model_config" and isinstance(value, Mapping):
                value = {**merged.get(name, {}), **value}
            merged[name] = value
    return Settings.of(merged)


def _refuse_plan_with_budgets(values: Layer, source: str) -> None:
    """Raise SettingsError if one source gives a plan file and budgets, which the plan contains."""
    given = [name for name in BUDGETS if values.get(name, "auto") not in ("auto", (), [])]
    if values.get("plan") is not None and given:
        raise SettingsError(
            given[0],
            f"cannot be combined with the plan {values['plan']}, which contains the budgets it was "
            f"made for; leave one of them out, or make a plan with other budgets",
            where=source,
        )


def parse_assignments(texts: Sequence[str]) -> dict[str, Any]:
    """Parse model config overrides such as `rope_theta=1e6`. A value that is not JSON is text."""
    changes = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise SettingsError("model_config", f"must have the form rope_theta=1e6, got {text!r}")
        try:
            changes[name.strip()] = json.loads(value)
        except ValueError:
            changes[name.strip()] = value
        except RecursionError:
            raise SettingsError("model_config", f"{name.strip()} is nested too deeply") from None
    return changes


# YAML.


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read settings from a YAML file, by field name.

    The file may be nested by group, as `write_yaml` writes it, or flat, as earlier versions wrote
    it. Names may have hyphens or underscores. `merge_layers` checks names and values. The ID of the
    run that wrote the file is left out; `read_run_id` returns it.
    """
    named = _read_mapping(path)
    named.pop(RUN_ID, None)
    return _flatten(named, str(path))


def read_run_id(path: str | Path) -> str:
    """Return the ID of the run that wrote a YAML file; "" if it has none."""
    found = _read_mapping(path).get(RUN_ID, "")
    if not isinstance(found, str):
        raise SettingsError(RUN_ID, f"must be text, got {found!r}", where=str(path))
    return found


def _read_mapping(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that maps names to values."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        twice = _key_given_twice(yaml.compose(text, yaml.SafeLoader), set())
    except OSError as failed:
        raise SettingsError("", f"cannot be read: {failed.strerror}", where=str(path)) from None
    except RecursionError:
        raise SettingsError("", "is nested too deeply", where=str(path)) from None
    except (yaml.YAMLError, ValueError) as wrong:  # a number or a date that Python cannot read
        first = str(wrong).splitlines()[0]
        raise SettingsError("", f"is not YAML: {first}", where=str(path)) from None
    if twice:
        raise SettingsError(twice, "is given twice", where=str(path))
    return {} if content is None else _named(content, "", str(path))


def _key_given_twice(node: Any, seen: set[int]) -> str:
    """Return a key that a mapping in a YAML document has twice, or "". YAML takes the last one."""
    import yaml

    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return ""
    seen.add(id(node))  # an alias leads to the same node, perhaps one that contains it
    names = set[str]()
    children = []
    for child in node.value:
        key, value = child if isinstance(node, yaml.MappingNode) else (None, child)
        children.append(value)
        if isinstance(key, yaml.ScalarNode):
            # `save-every` and `save_every` are the same setting.
            name = str(key.value).replace("-", "_")
            if name in names:
                return name
            names.add(name)
    return next((found for child in children if (found := _key_given_twice(child, seen))), "")


def write_yaml(
    settings: Settings, path: str | Path, remarks: Sequence[str] = (), *, run_id: str = ""
) -> None:
    """Write all settings to a YAML file, nested by group, with the remarks as comments on top.

    `run_id` is the ID of the run, if it has one.
    """
    import yaml

    plain = {
        group: {f.name: to_json(getattr(getattr(settings, group), f.name)) for f in fields}
        for group, fields in ((name, dataclasses.fields(cls)) for name, cls in GROUPS.items())
    }
    text = "".join(f"# {remark}\n" for remark in remarks)
    text += yaml.safe_dump({RUN_ID: run_id}) if run_id else ""
    text += yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    replace_file(path, text)


def _flatten(content: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Replace each group by its fields."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        # `model`, `data` and `schedule` name a group and a field of it. No such field is a mapping.
        if name in GROUPS and value is None:
            fields = {}
        elif name in GROUPS and (isinstance(value, Mapping) or name not in GROUP_OF):
            fields = _named(value, name, path)
        else:
            fields = {name: value}
        for field_name, field_value in fields.items():
            if field_name in flat:
                raise SettingsError(field_name, "is given twice", where=path)
            flat[field_name] = field_value
    return flat


def _named(content: Any, name: str, path: str) -> dict[str, Any]:
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise SettingsError(name, "must map names to values", where=path)
    return {key.replace("-", "_"): value for key, value in content.items()}


# Conversion and checks.


def _group_of(name: str, values: Layer, source: str) -> str:
    if name in GROUP_OF:
        return GROUP_OF[name]
    close = difflib.get_close_matches(name, [known for known in GROUP_OF if known not in values], 1)
    hint = f"did you mean {close[0]}?" if close else f"the settings are {', '.join(GROUP_OF)}"
    raise SettingsError(name, f"is not a setting; {hint}", where=source)


def _replace_group(group: Any, values: Mapping[str, Any], source: str) -> Any:
    for name, value in values.items():
        # As a path, an empty text would be the current directory.
        if value == "" and (name == "out" or TYPES[name] == str | None):
            raise SettingsError(name, 'must not be empty, got ""; leave it out', where=source)
    unchanged = {f.name: getattr(group, f.name) for f in dataclasses.fields(group)}
    try:
        return from_json(type(group), {**unchanged, **values})
    except RecordError as wrong:
        raise SettingsError(wrong.field, wrong.problem, where=source) from None


def _convert(name: str, value: Any) -> Any:
    """Convert what users write on the command line, in YAML or in Python to the field's type."""
    hint = TYPES.get(name)
    if value is None and name in _OFF:
        return _OFF[name]
    if get_origin(hint) is tuple:
        if isinstance(value, str):
            value = value.split(",") if name in COMMA_SEPARATED else [value]
        if float in get_args(hint) and isinstance(value, list | tuple):
            value = [_to_float(item) for item in value]
        return value
    if hint is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if hint is float or (hint is not None and float in get_args(hint)):
        return _to_float(value)
    return value


_OFF: Mapping[str, Any] = {"micro_batch": "auto", "clip": 0.0, "neftune_noise_alpha": 0.0}
"""What None means for fields that have another word for it: Python callers write `clip=None`."""

COMMA_SEPARATED = ("betas", "columns", "data_weights", "log", "lora")
"""Tuples that are written as one text with commas."""


def _to_float(value: Any) -> Any:
    """Convert text to a number where possible: YAML 1.1 reads 1e-5 as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _require_at_least(group: Any, **least: float) -> None:
    for name, value in least.items():
        given = getattr(group, name)
        _refuse(name, given < value, f"must be at least {value}", given)


def _require_at_most(group: Any, **most: int) -> None:
    for name, value in most.items():
        given = getattr(group, name)
        _refuse(name, given > value, f"must be at most {value}", given)


def _require_positive(group: Any, *names: str) -> None:
    for name in names:
        given = getattr(group, name)
        _refuse(name, given is not None and given <= 0, "must be greater than 0", given)


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


def _refuse(name: str, wrong: bool, rule: str, given: object) -> None:
    if wrong:
        raise SettingsError(name, f"{rule}, got {given}")
