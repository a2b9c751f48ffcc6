"""The small files that make a folder of weights a model. Room: keep."""

from __future__ import annotations

import copy
import os
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

_KEPT = (
    "config.json",
    "generation_config.json",
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
_CODE = "*.py"


def copy_model_files(
    source: str | Path, folder: str | Path, *, trust_remote_code: bool = False
) -> tuple[str, ...]:
    """Config, tokenizer and chat templates of a model's directory; the names of those copied.

    What is there already is left as it is. The model's own code goes with them only if it is
    trusted. Links, as a download cache has them, are followed.
    """
    patterns = (*_KEPT, _CODE) if trust_remote_code else _KEPT
    copied = []
    for name in sorted(_names(Path(source))):
        target = Path(folder, name)
        if any(_matches(name, pattern) for pattern in patterns) and not target.exists():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(Path(source, name), target)
            copied.append(name)
    return tuple(copied)


def write_config(
    config: Any, folder: str | Path, *, dtype: torch.dtype, architecture: str = ""
) -> None:
    """`config.json` of a transformers config, saying the dtype that the weights are written in.

    `architecture` is the model's class name, where the config does not say it.
    """
    told = copy.deepcopy(config)
    for part in (told, *(getattr(told, name, None) for name in told.sub_configs)):
        if part is not None:
            part.dtype = dtype
    if architecture and not told.architectures:
        told.architectures = [architecture]
    path = Path(folder, "config.json")
    with open(path, "w", encoding="utf-8") as file:
        file.write(told.to_json_string(use_diff=True))
        file.flush()
        os.fsync(file.fileno())


def _names(source: Path) -> set[str]:
    """Files directly in the directory, and one level below it."""
    found = [path for pattern in ("*", "*/*") for path in source.glob(pattern)]
    return {path.relative_to(source).as_posix() for path in found if path.is_file()}


def _matches(name: str, pattern: str) -> bool:
    # fnmatch lets * cross a slash: tokenizer* must not take a whole directory.
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)
