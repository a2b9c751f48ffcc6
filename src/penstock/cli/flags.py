"""Generate command-line flags from the settings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from penstock.errors import SettingsError
from penstock.settings import (
    COMMA_SEPARATED,
    GROUP_OF,
    TYPES,
    Settings,
    parse_assignments,
    settings_fields,
)
from penstock.units import format_bytes, parse_bytes

PANELS = {
    "model": "Model and data",
    "data": "Model and data",
    "schedule": "Schedule",
    "memory": "Memory",
    "checkpoint": "Checkpoints",
    "evaluation": "Evaluation",
    "logging": "Logging",
}
"""Panel of `--help` that shows the flags of each group of settings."""


def settings_parameters(
    names: Iterable[str] | None = None, *, check_choices: bool = True, hidden: bool = False
) -> list[inspect.Parameter]:
    """Generate one parameter per setting, or per named setting.

    Every flag defaults to None: a value that is not on the command line may come from a file.

    Args:
        names: Settings to generate flags for; all of them by default.
        check_choices: Whether the command line parser refuses unknown choices, with exit code 2.
            Otherwise the settings refuse them, with exit code 1.
        hidden: Whether the help leaves the flags out.
    """
    return [_parameter(field, check_choices, hidden) for field in settings_fields(names)]


def parse_size(
    text: str, flag: str, parse: Callable[[str], int] = parse_bytes, *, least: int = 0
) -> int:
    """Parse the size that a flag has; a wrong one is a usage error."""
    try:
        nbytes = parse(text)
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong), param_hint=flag) from None
    if nbytes < least:
        raise typer.BadParameter(
            f"must be at least {format_bytes(least)}, got {text}", param_hint=flag
        )
    return nbytes


def keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """Make a keyword-only parameter, for flags that are not settings."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def set_parameters(command: Callable[..., None], parameters: list[inspect.Parameter]) -> None:
    """Give a command that takes `**flags` the parameters from which typer derives its flags."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


def given_settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that were given on the command line, by field name."""
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    if "model_config" in given:
        given["model_config"] = parse_assignments(given["model_config"])
    return given


def settings_from_flags(flags: Mapping[str, Any]) -> Settings:
    """Build settings from the command line alone. An invalid value is a usage error."""
    try:
        return Settings.of(given_settings(flags))
    except SettingsError as wrong:
        raise usage_error(wrong) from None


def usage_error(wrong: SettingsError) -> typer.BadParameter:
    """Convert an error in a setting to a usage error of its flag, with exit code 2."""
    return typer.BadParameter(wrong.problem, param_hint=flag_name(wrong.field))


REQUIRED = {
    "model": "MODEL is missing: name a model directory or a Hugging Face model ID",
    "data": "--data is missing: name the training data, for example --data chats.jsonl",
    "out": "--out is missing: name a directory for checkpoints and the trained model, for example "
    "--out out/",
}
"""What to say if a setting that has no default is given neither by a flag nor in a file."""


class MissingSettingError(typer.BadParameter):
    """A setting that a command cannot do without, with exit code 2."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{REQUIRED[name]}. A file of --config may also set it.")

    def format_message(self) -> str:
        return self.message  # without the words "Invalid value"


def flag_name(name: str) -> str:
    """Return the flag of a setting, e.g. `--micro-batch`."""
    return f"--{name.replace('_', '-')}"


def setting_option(name: str, panel: str) -> Any:
    """Return the typer option of a setting, for commands that take only a few of them."""
    (field,) = settings_fields((name,))
    return typer.Option(flag_name(name), help=field.metadata["help"], rich_help_panel=panel)


def _parameter(
    field: dataclasses.Field[Any], check_choices: bool, hidden: bool
) -> inspect.Parameter:
    help_ = field.metadata["help"]
    if field.name == "model":
        return keyword("model", Annotated[str | None, typer.Argument(help=help_)], None)
    kind, metavar = _flag_type(field.name, TYPES[field.name], check_choices)
    name = flag_name(field.name)
    flag: Any = typer.Option(
        # A setting that is on by default, or may be, needs a second flag to switch it off.
        f"{name}/--no-{name[2:]}" if _may_be_on(field) else name,
        help=help_,
        metavar=metavar,
        show_default=_shown_default(field),
        rich_help_panel=PANELS[GROUP_OF[field.name]],
        hidden=hidden,
    )
    return keyword(field.name, Annotated[kind | None, flag], None)


def _flag_type(name: str, hint: Any, check_choices: bool) -> tuple[Any, str | None]:
    """Return the type that typer parses, and the placeholder that the help shows."""
    if name in COMMA_SEPARATED:
        return str, None
    if get_origin(hint) is tuple or name == "model_config":
        return list[str], None
    kind = hint
    if get_origin(hint) is not Literal:  # without the None of an optional setting
        kind = next((arg for arg in get_args(hint) if arg is not type(None)), hint)
    if get_origin(kind) is Literal and not check_choices:
        return str, f"[{'|'.join(get_args(kind))}]"
    return kind, None


def _may_be_on(field: dataclasses.Field[Any]) -> bool:
    """Return whether a setting can be on without a flag."""
    return field.default is True or (field.default is None and bool in get_args(TYPES[field.name]))


def _shown_default(field: dataclasses.Field[Any]) -> str | bool:
    value = field.default
    if value is dataclasses.MISSING or value in (None, (), False, ""):
        return False
    if value is True:
        return "on"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
