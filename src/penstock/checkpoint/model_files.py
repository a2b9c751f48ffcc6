"""Copy or write the small files that a directory of weights needs to be a model."""

from __future__ import annotations

import copy
import os
import shutil
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

_PATTERNS = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
_CODE_PATTERN = "*.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """What transformers needs, in addition to the weights, to load a model from a directory."""

    config: Any
    """The config of the model that is saved; for a multimodal model, with all its parts."""

    dtype: torch.dtype
    """Type of the saved weights."""

    architecture: str = ""
    """Class name of the model, used if the config does not name one."""

    source: Path | None = None
    """Directory with the tokenizer and other small files; None if it is not known."""

    generation_config: Any = None
    """Defaults of `generate`; None if the source has them as a file."""

    trust_remote_code: bool = False
    """Whether the model's own code is copied."""

    def write(self, folder: str | Path, *, tokenizer: Any = None) -> None:
        """Write them into an existing directory; `tokenizer` replaces that of the source."""
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        write_config(self.config, folder, dtype=self.dtype, architecture=self.architecture)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(str(folder))
        if self.source is not None:
            copy_model_files(self.source, folder, trust_remote_code=self.trust_remote_code)


def copy_model_files(
    source: str | Path, folder: str | Path, *, trust_remote_code: bool = False
) -> tuple[str, ...]:
    """Copy config, tokenizer and chat templates of a model, and return the names copied.

    Existing files are not overwritten. The model's own code is copied only if it is trusted.
    Symbolic links, such as those of a download cache, are followed.
    """
    patterns = (*_PATTERNS, _CODE_PATTERN) if trust_remote_code else _PATTERNS
    copied = []
    for name in sorted(_file_names(Path(source))):
        target = Path(folder, name)
        if any(_matches(name, pattern) for pattern in patterns) and not target.exists():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(Path(source, name), target)
            copied.append(name)
    return tuple(copied)


def write_config(
    config: Any, folder: str | Path, *, dtype: torch.dtype, architecture: str = ""
) -> None:
    """Write `config.json` of a transformers config with the dtype of the saved weights.

    `architecture` is the model's class name, used if the config does not name one.
    """
    config = copy.deepcopy(config)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    if architecture and not config.architectures:
        config.architectures = [architecture]
    path = Path(folder, "config.json")
    with open(path, "w", encoding="utf-8") as file:
        file.write(config.to_json_string(use_diff=True))
        file.flush()
        os.fsync(file.fileno())


def _file_names(source: Path) -> set[str]:
    """List the files in the directory and one level below it, as relative paths."""
    paths = [path for pattern in ("*", "*/*") for path in source.glob(pattern)]
    return {path.relative_to(source).as_posix() for path in paths if path.is_file()}


def _matches(name: str, pattern: str) -> bool:
    # fnmatch lets * match a slash, but "tokenizer*" must not match files in a subdirectory.
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)
