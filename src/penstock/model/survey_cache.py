"""Surveys of models that were made before, in the user's cache.

A survey imports torch and transformers, which takes longer than planning. Its result depends on the
config file, the options and the code alone, so `penstock plan` makes it once.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import SurveyError
from penstock.machine.user_cache import cache_directory, code_fingerprint, load_entry, save_entry
from penstock.model.adapters import Adapter
from penstock.model.config import load_config
from penstock.model.head_in_files import files_lack_head
from penstock.model.hub import check_name, hub_is_reachable
from penstock.model.inventory import Inventory
from penstock.model.survey import survey_config
from penstock.records import Json

if TYPE_CHECKING:
    from torch import nn

PACKAGES = ("torch", "transformers", "peft")
"""Packages whose version may change the survey of a model."""


class DeferredConfig:
    """A model's config that transformers reads only if more than its fields is needed."""

    def __init__(self, fields: Mapping[str, Any], load: Callable[[], Any]) -> None:
        self._fields, self._load = fields, load

    def to_dict(self) -> Mapping[str, Any]:
        """Return the fields."""
        return self._fields

    def load(self) -> Any:
        """Return the config as transformers reads it."""
        return self._load()


def loaded_config(config: Any) -> Any:
    """Return a config as transformers reads it."""
    return config.load() if isinstance(config, DeferredConfig) else config


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """The survey of one model."""

    config: Json
    """Fields of the config."""

    inventory: Inventory
    """The inventory."""


def cached_survey(
    model: str | Path,
    *,
    revision: str | None = None,
    changes: Mapping[str, Any] | None = None,
    blocks: str | None = None,
    freeze: Sequence[str] = (),
    trust_remote_code: bool = False,
    adapter: Adapter | None = None,
) -> tuple[DeferredConfig, Inventory]:
    """Return the config and the inventory of a model; see `load_config` and `survey_config`.

    A model with code of its own is surveyed every time, because its code may have changed.
    """

    def load() -> Any:
        return load_config(
            model, trust_remote_code=trust_remote_code, revision=revision, changes=changes
        )

    text = None if trust_remote_code else _config_text(model, revision)
    key = _key(text, model, changes, blocks, freeze, adapter)
    path = cache_directory() / "surveys" / f"{key}.json"
    entry = load_entry(_Entry, path) if text is not None else None
    if entry is None:
        config = load()
        entry = _Entry(
            config=json.loads(json.dumps(config.to_dict(), default=str)),
            inventory=survey_config(
                config, name=str(model), blocks=blocks, freeze=freeze,
                trust_remote_code=trust_remote_code, adapter=adapter, check=_check_model,
            ),
        )  # fmt: skip
        if text is not None:
            save_entry(entry, path)
    return DeferredConfig(entry.config, load), replace(entry.inventory, model=str(model))


def _check_model(model: nn.Module, inventory: Inventory) -> Inventory:
    from penstock.model.self_check import check_model  # imports torch

    return check_model(model, inventory)


def _config_text(model: str | Path, revision: str | None) -> bytes | None:
    """Return the content of the model's config file, or None if only transformers can find it."""
    path = Path(model)
    file = path if path.name == "config.json" else path / "config.json"
    try:
        if not path.exists():
            # Asks the hub whether the downloaded file is the newest, as transformers does.
            from huggingface_hub import hf_hub_download

            check_name(model)
            file = Path(
                hf_hub_download(
                    str(model), "config.json", revision=revision,
                    local_files_only=not hub_is_reachable(),
                )
            )  # fmt: skip
        return file.read_bytes()
    except (OSError, ValueError, SurveyError):
        return None  # loading the config fails in the same way, and says so


def _key(
    text: bytes | None,
    model: str | Path,
    changes: Mapping[str, Any] | None,
    blocks: str | None,
    freeze: Sequence[str],
    adapter: Adapter | None,
) -> str:
    """Return the name of an entry: a hash of everything that a survey depends on."""
    digest = hashlib.sha256(text or b"")
    options: list[Any] = [
        sorted((changes or {}).items()),
        blocks,
        list(freeze),
        files_lack_head(model),
    ]
    if adapter is not None:
        options.append(adapter.key)
    versions = [_version(package) for package in PACKAGES]
    digest.update(json.dumps([options, versions, code_fingerprint()], default=str).encode())
    return digest.hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
