"""Settings from the command line, from YAML and to YAML. Room: show.

Layers are plain mappings by field name, the stronger last: defaults, the run.yaml of the run that
is resumed, `--config`, the command line.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from penstock.errors import RecordError
from penstock.records import from_json, to_json
from penstock.train.errors import SettingsError
from penstock.train.settings import RunSettings

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
