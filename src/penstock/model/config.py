"""A model's config, as transformers reads it. Room: measure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import SurveyError


def load_config(
    model: str | Path,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Any:
    """The config of the text model, with `changes` such as {"rope_parameters.rope_theta": 1e6}."""
    import transformers

    where = Path(model)
    if where.is_file() and where.name == "config.json":
        where = where.parent
    if where.is_dir() and not (where / "config.json").is_file():
        raise SurveyError(f"{where} has no config.json, which is all that planning needs")
    if not where.is_dir() and (where.is_absolute() or str(model).startswith(".")):
        raise SurveyError(f"there is no directory {where}")
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(where) if where.is_dir() else str(model),
            trust_remote_code=trust_remote_code,
            revision=revision,
        )
    except (OSError, ValueError, KeyError) as problem:
        raise SurveyError(_why_no_config(model, where.is_dir(), problem)) from None
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name, value in (changes or {}).items():
        _change(config, name, value)
    return config


def _change(config: Any, name: str, value: Any) -> None:
    """Set a field, or one inside a field: `rope_theta` is looked for where models keep it."""
    if not hasattr(config, name) and name in (getattr(config, "rope_parameters", None) or {}):
        name = f"rope_parameters.{name}"
    outer, _, inner = name.partition(".")
    if not hasattr(config, outer):
        known = ", ".join(sorted(k for k in config.to_dict() if not k.startswith("_"))[:40])
        raise SurveyError(f"the model's config has no {outer!r}; it has {known}")
    if inner:
        getattr(config, outer)[inner] = value
    else:
        setattr(config, outer, value)


def _why_no_config(model: str | Path, is_directory: bool, problem: Exception) -> str:
    first = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
    if is_directory:
        return f"{model}/config.json could not be read by transformers: {first}"
    return (
        f"the config of {model} could not be had from the Hugging Face hub ({first}); without a "
        f"network, pass a directory that holds its config.json"
    )
