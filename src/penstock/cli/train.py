"""`penstock train`. Room: show.

Its flags are the fields of RunSettings; `cli.py` gives it its name.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from penstock.train.errors import SettingsError
from penstock.train.settings import RUN_FILE, Layer, RunSettings, parse_changes, read_yaml, settle

EXIT_INTERRUPTED = 130

Option = typer.Option


def train_command(**given: Any) -> None:
    """Fine-tune a model under a budget per tier. Ctrl-C once saves and stops; --resume goes on."""
    from penstock.train.session import pick_view, train

    resume, as_json, steps = (given.pop(name) for name in ("resume", "as_json", "profile"))
    settings = _settings(given, resume=resume)
    view = pick_view(as_json)
    try:
        code = train(settings, resume=resume, view=view, as_json=as_json, profile=steps)
    except KeyboardInterrupt:
        typer.echo("interrupted before the first step; nothing was lost", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    raise typer.Exit(code)


def _settings(given: dict[str, Any], *, resume: bool) -> RunSettings:
    """The command line over --config over what the run was over the defaults."""
    config = given.pop("config")
    flags = {name: value for name, value in given.items() if value not in (None, [])}
    try:
        if "model_config" in flags:
            flags["model_config"] = parse_changes(flags["model_config"])
        layers: list[tuple[str, Layer]] = [("", flags)]
        if config is not None:
            layers.insert(0, (str(config), read_yaml(config)))
        if resume and (before := _run_file(layers)) is not None:
            layers.insert(0, (str(before), read_yaml(before)))
        _check_there(layers)
        settings = settle(layers)
        return _with_plan(settings, layers)
    except SettingsError as wrong:
        if wrong.field in flags or (not wrong.where and config is None and not resume):
            hint = f"--{wrong.field.replace('_', '-')}"
            raise typer.BadParameter(wrong.problem, param_hint=hint) from None
        raise


def _with_plan(settings: RunSettings, layers: list[tuple[str, Layer]]) -> RunSettings:
    """What a plan file says holds where nobody says otherwise."""
    if settings.plan is None:
        return settings
    from penstock.train.plan_choice import plan_layer

    return settle([(settings.plan, plan_layer(settings.plan)), *layers])


def _run_file(layers: list[tuple[str, Layer]]) -> Path | None:
    out = next((layer["out"] for _, layer in reversed(layers) if layer.get("out")), None)
    path = Path(str(out)) / RUN_FILE if out is not None else None
    return path if path is not None and path.is_file() else None


def _check_there(layers: list[tuple[str, Layer]]) -> None:
    said: set[str] = set().union(*(layer for _, layer in layers))
    for name, flag in (("model", "MODEL"), ("data", "--data"), ("out", "--out")):
        if name not in said:
            raise typer.BadParameter("is missing", param_hint=flag)


# The flags, from the settings.

_AS_TEXT = ("betas", "log")
"""Tuples that are one text with commas on the command line."""


def _parameters() -> list[inspect.Parameter]:
    hints = get_type_hints(RunSettings)
    made = [_parameter(field, hints[field.name]) for field in dataclasses.fields(RunSettings)]
    config = Option(help="Settings as YAML, by the names of the flags.")
    resume = Option("--resume", help="Go on from the newest checkpoint in --out.")
    as_json = Option("--json", help="One JSON object per line for programs, nothing else.")
    profile = Option("--profile", min=1, help="Record the first N steps in OUT/profile.")
    made += [
        _keyword("profile", Annotated[int | None, profile], None),
        _keyword("config", Annotated[Path | None, config], None),
        _keyword("resume", Annotated[bool, resume], False),
        _keyword("as_json", Annotated[bool, as_json], False),
    ]
    return made


def _parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    """Each may be left out: what is not given here may be given elsewhere."""
    help_ = field.metadata["help"]
    if field.name == "model":
        return _keyword("model", Annotated[str | None, typer.Argument(help=help_)], None)
    if get_origin(hint) is tuple:
        kind: Any = str if field.name in _AS_TEXT else list[str]
    elif field.name == "model_config":
        kind = list[str]
    else:
        kind = next((a for a in get_args(hint) if a is not type(None)), hint)
        kind = hint if isinstance(kind, str) else kind  # a Literal's choices
    flag = f"--{field.name.replace('_', '-')}"
    option: Any = Option(flag, help=help_, show_default=_default(field))
    return _keyword(field.name, Annotated[kind | None, option], None)


def _default(field: dataclasses.Field[Any]) -> str | bool:
    value = field.default
    if value is dataclasses.MISSING or value in (None, (), False) or isinstance(value, Mapping):
        return False
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


train_command.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
