"""How often something is done: by steps or by the clock. Room: show."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from penstock.errors import RecordError
from penstock.records import Json, from_json, to_json
from penstock.roles import Dtype, Moments
from penstock.train.errors import SettingsError

_UNITS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600, "hour": 3600, "hours": 3600, "d": 86400}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*")


@dataclass(frozen=True, slots=True)
class Interval:
    """One of the two."""

    steps: int | None = None
    seconds: float | None = None

    def is_due(self, *, steps: int, seconds: float) -> bool:
        """After so many steps and seconds since the last time."""
        if self.steps is not None:
            return steps >= self.steps
        assert self.seconds is not None
        return seconds >= self.seconds and steps > 0


def parse_interval(text: str, field: str = "save_every") -> Interval:
    """`30min`, `90s`, `2h`, or a number of steps."""
    match = _TEXT.fullmatch(text.lower())
    if match and not match[2] and match[1].isdigit() and int(match[1]) > 0:
        return Interval(steps=int(match[1]))
    if match and match[2] in _UNITS and float(match[1]) > 0:
        return Interval(seconds=float(match[1]) * _UNITS[match[2]])
    raise SettingsError(field, f"must be a time such as 30min, 90s or 2h, or steps, got {text!r}")


# --------
# Everything a run can be told. Room: show.
#
# The command's flags and the keys of run.yaml are the fields of RunSettings and nothing else.

# ruff: noqa: RUF009 - told() is dataclasses.field()


Schedule = Literal["cosine", "linear", "constant"]


def option(help_: str, default: Any = MISSING) -> Any:
    """A field whose words are the flag's help."""
    if isinstance(default, Mapping):
        return field(default_factory=lambda: dict(default), metadata={"help": help_})
    return field(default=default, metadata={"help": help_})


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """One run, as the user asks for it."""

    model: str = option("A directory, or a Hugging Face id.")
    data: tuple[str, ...] = option("Files, directories or dataset ids; may be given again.")
    out: str = option("Where checkpoints, metrics and the model go.")
    context: int = option("Tokens in a sequence.", 4096)
    batch: int = option("Sequences per optimizer step.", 32)
    epochs: float | None = option("Passes over the data; 1 unless --steps is given.", None)
    steps: int | None = option("Optimizer steps, instead of --epochs.", None)
    micro_batch: str = option("Sequences computed at once.", "auto")
    hbm: str = option("Of the GPU: a size such as 22GiB, or auto.", "auto")
    dram: str = option("Of memory with CPUs.", "auto")
    cxl: str = option("Of CXL memory.", "auto")
    nvme: tuple[str, ...] = option("PATH:SIZE; may be given again.", ())
    moments: Moments = option("fp32 is exact; bf16 and int8 take less room.", "fp32")
    plan: str | None = option("A plan made by `penstock plan -o`, instead of budgets.", None)
    lr: float = option("Learning rate at its highest.", 1e-5)
    schedule: Schedule = option("How the learning rate falls.", "cosine")
    warmup: float = option("Below 1 a share of the steps, else a number of steps.", 0.03)
    betas: tuple[float, ...] = option("Of AdamW.", (0.9, 0.95))
    weight_decay: float = option("Of matrices; norms and biases are not decayed.", 0.1)
    clip: float = option("Largest gradient norm; 0 for none.", 1.0)
    dtype: Dtype = option("What is computed in.", "bf16")
    freeze: tuple[str, ...] = option("A pattern of tensors not trained; may be given again.", ())
    model_config: Json = option("KEY=VALUE of the model's config; may be given again.", {})
    init: Literal["pretrained", "random"] = option("Where weights come from.", "pretrained")
    revision: str | None = option("Of the model on the hub.", None)
    trust_remote_code: bool = option("Run the model's own code.", False)
    eval_data: tuple[str, ...] = option("Held-out data; may be given again.", ())
    eval_split: float | None = option("Share of the data to hold out.", None)
    eval_every: int | None = option("Steps between evaluations; always at both ends.", None)
    sample_prompts: str | None = option("JSON lines, answered at each evaluation.", None)
    sample_new: int = option("Tokens of such an answer at most.", 64)
    overlong: Literal["truncate", "drop", "split"] = option("What to do with documents longer than "
                                                          "the context.", "truncate")  # fmt: skip
    skip_bad_lines: bool = option("Leave out lines that are no examples.", False)
    cache: str | None = option("Where tokens are kept.", None)
    save_every: str = option("A time such as 30min, or a number of steps.", "30min")
    keep: int = option("Checkpoints that are kept; the newest has the optimizer's state.", 2)
    save_weights_only: bool = option("Checkpoints without optimizer state: no resume.", False)
    on_nonfinite: Literal["raise", "skip"] = option("A loss that is NaN stops the run, or the step "
                                                  "is left out.", "raise")  # fmt: skip
    deterministic: bool = option("Only kernels that give the same bits every time.", False)
    seed: int = option("Of order, dropout and random weights.", 0)
    log: tuple[str, ...] = option("tensorboard, wandb, or both with a comma.", ())

    def __post_init__(self) -> None:
        _check(self)

    @property
    def micro_batch_size(self) -> int | None:
        return None if self.micro_batch == "auto" else int(self.micro_batch)

    @property
    def evaluates(self) -> bool:
        return bool(self.eval_data) or self.eval_split is not None


CHANGES_BITS = (
    *("context", "batch", "moments", "lr", "schedule", "warmup", "betas", "weight_decay", "clip"),
    *("dtype", "freeze", "model_config", "deterministic", "seed", "overlong", "on_nonfinite"),
)
"""Settings that can change the result; a resume tells those that are not what they were."""


def _check(option: RunSettings) -> None:
    least = {"context": 2, "batch": 1, "keep": 1, "seed": 0, "sample_new": 1}
    for name, value in least.items():
        _refuse(
            name, getattr(option, name) < value, f"must be {value} or more", getattr(option, name)
        )
    for name in ("steps", "epochs", "eval_every"):
        value = getattr(option, name)
        _refuse(name, value is not None and value <= 0, "must be above 0", value)
    for name in ("lr", "warmup", "weight_decay", "clip"):
        _refuse(name, getattr(option, name) < 0, "must be 0 or more", getattr(option, name))
    both = option.steps is not None and option.epochs is not None
    _refuse("steps", both, "and epochs cannot both be given", option.steps)
    both = bool(option.eval_data) and option.eval_split is not None
    _refuse("eval_split", both, "and eval_data cannot both be given", option.eval_split)
    pair = len(option.betas) == 2 and all(0 <= beta < 1 for beta in option.betas)
    _refuse("betas", not pair, "must be two numbers from 0 to below 1", list(option.betas))
    _refuse("data", not option.data, "must name at least one file", [])
    number = (
        option.micro_batch.isascii()
        and option.micro_batch.isdigit()
        and int(option.micro_batch) > 0
    )
    known = option.micro_batch == "auto" or number
    _refuse("micro_batch", not known, "must be auto or a number of 1 or more", option.micro_batch)
    known = set(option.log) <= {"tensorboard", "wandb"}
    _refuse("log", not known, "may be tensorboard and wandb", list(option.log))
    if not isinstance(option.model_config, Mapping):
        raise SettingsError(
            "model_config", f"must be names and values, got {option.model_config!r}"
        )
    parse_interval(option.save_every)


def _refuse(name: str, wrong: bool, rule: str, got: object) -> None:
    if wrong:
        raise SettingsError(name, f"{rule}, got {got}")


# --------
# Settings from the command line, from YAML and to YAML. Room: show.
#
# Layers are plain mappings by field name, the stronger last: defaults, the run.yaml of the run
# that
# is resumed, `--config`, the command line.

RUN_FILE = "run.yaml"

Layer = Mapping[str, Any]

_BUDGETS = ("hbm", "dram", "cxl", "nvme")

_RIVALS: Mapping[str, Sequence[str]] = {
    "steps": ("epochs",),
    "epochs": ("steps",),
    "eval_data": ("eval_split",),
    "eval_split": ("eval_data",),
    "plan": _BUDGETS,
    **dict.fromkeys(_BUDGETS, ("plan",)),
}
"""Saying one in a stronger layer takes the others back."""


def settle(layers: Sequence[tuple[str, Layer]]) -> RunSettings:
    """One RunSettings of layers, each with where it comes from, the strongest last."""
    merged: dict[str, Any] = {}
    for where, layer in layers:
        told = {name: _plain(name, value) for name, value in layer.items()}
        for name, value in told.items():
            if value not in (None, (), []):
                for rival in _RIVALS.get(name, ()):
                    if rival not in told:
                        merged.pop(rival, None)
            if name == "model_config" and isinstance(value, Mapping):
                value = {**merged.get(name, {}), **value}
            merged[name] = value
        _check_names(told, where)
    try:
        return from_json(RunSettings, merged)
    except RecordError as wrong:
        raise SettingsError(wrong.field, wrong.problem) from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The settings that a file gives. Unknown ones are told when they are settled."""
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as failed:
        raise SettingsError("", f"cannot be read: {failed.strerror}", where=str(path)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as wrong:
        first = str(wrong).splitlines()[0]
        raise SettingsError("", f"is not YAML: {first}", where=str(path)) from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise SettingsError("", "must hold names and values", where=str(path))
    return {key.replace("-", "_"): value for key, value in found.items()}


def write_yaml(settings: RunSettings, path: str | Path, remarks: Sequence[str] = ()) -> None:
    """All of them, and what became of `auto` as remarks; whole or not at all."""
    import yaml

    names = [f.name for f in dataclasses.fields(settings)]
    plain = {name: to_json(getattr(settings, name)) for name in names}
    text = "".join(f"# {remark}\n" for remark in remarks)
    text += yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    draft = Path(path).with_name(f".{Path(path).name}.tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def parse_changes(texts: Sequence[str]) -> dict[str, Any]:
    """`rope_theta=1e6` as a name and a value; what is not JSON is a text."""
    changes = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise SettingsError("model_config", f"must be such as rope_theta=1e6, got {text!r}")
        try:
            changes[name.strip()] = json.loads(value)
        except ValueError:
            changes[name.strip()] = value
    return changes


def _check_names(layer: Layer, where: str) -> None:
    """Here, and not when all are one: the message must say which file it is."""
    known = {f.name for f in dataclasses.fields(RunSettings)}
    try:
        from_json(RunSettings, {"model": "", "data": ["-"], "out": "", **dict(layer)})
    except RecordError as wrong:
        if wrong.field in layer or wrong.field not in known:
            raise SettingsError(wrong.field, wrong.problem, where=where) from None


def _plain(name: str, value: Any) -> Any:
    """What people write, as the field's own type."""
    hint = get_type_hints(RunSettings).get(name)
    if get_origin(hint) is tuple:
        if isinstance(value, str):
            value = value.split(",") if name in ("betas", "log") else [value]
        if float in get_args(hint) and isinstance(value, list | tuple):
            value = [_number(item) for item in value]
        return value
    if hint is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if hint is float or (hint is not None and float in get_args(hint)):
        return _number(value)
    return value


def _number(value: Any) -> Any:
    """YAML takes 1e-5 for a text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
