"""Copy or write the small files that a directory of weights needs to be a model."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.adapter_files import BASE, AdapterFiles
from penstock.checkpoint.adapter_files import CONFIG as ADAPTER_CONFIG
from penstock.checkpoint.errors import IncompleteModelFileError, NoModelFilesError
from penstock.durable_files import copy_file, replace_file

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
    ADAPTER_CONFIG,
    BASE,
)
_OF_WHOLE_MODELS = ("config.json", "generation_config.json", ADAPTER_CONFIG, BASE)
"""Files that a directory with an adapter does not have, or not those of another model."""

_CODE_PATTERN = "*.py"

_PROBED_NBYTES = 256
"""Bytes at each end of a file that are read to find out whether it is complete."""


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

    adapter: AdapterFiles | None = None
    """The adapter that is saved instead of a whole model; None for a model."""

    contents: Mapping[str, bytes] = field(default_factory=dict)
    """Small files in memory, by relative path. `keep_contents` puts them in the place of a source,
    because the source may be removed during a run that takes days."""

    @property
    def names(self) -> tuple[str, ...]:
        """Relative paths of the files that `write` writes, as far as no other file decides them."""
        return (*self._written, *self.contents)

    @property
    def _written(self) -> tuple[str, ...]:
        """Names of the files that are made here, and not copied."""
        return ("config.json",) if self.adapter is None else (ADAPTER_CONFIG, BASE)

    def keep_contents(self, folder: str | Path) -> ModelFiles:
        """Return the files that `write` wrote to a directory, to be written from memory."""
        paths = _small_files(Path(folder), trust_remote_code=self.trust_remote_code)
        contents = {name: path.read_bytes() for name, path in paths.items()}
        for name in ("config.json", *self._written):
            contents.pop(name, None)
        return replace(self, source=None, generation_config=None, contents=contents)

    def write(self, folder: str | Path, *, tokenizer: Any = None) -> None:
        """Write them into an existing directory; `tokenizer` replaces that of the source."""
        if tokenizer is not None:
            _save_pretrained(tokenizer, Path(folder))
        if self.adapter is not None:
            # transformers takes a directory with a config for a whole model.
            self.adapter.write(folder)
        else:
            write_config(self.config, folder, dtype=self.dtype, architecture=self.architecture)
        if self.generation_config is not None and self.adapter is None:
            _save_pretrained(self.generation_config, Path(folder))
        if self.source is not None:
            excluded = () if self.adapter is None else _OF_WHOLE_MODELS
            copy_model_files(
                self.source, folder, trust_remote_code=self.trust_remote_code, exclude=excluded
            )
        for name, content in self.contents.items():
            target = Path(folder, name)
            if not target.is_file() or target.read_bytes() != content:
                target.parent.mkdir(exist_ok=True)
                replace_file(target, content)


def copy_model_files(
    source: str | Path,
    folder: str | Path,
    *,
    trust_remote_code: bool = False,
    exclude: Sequence[str] = (),
) -> tuple[str, ...]:
    """Copy config, tokenizer and chat templates of a model, and return the names copied.

    Files with a name in `exclude` are not copied.
    Existing files are not overwritten, unless a power cut left them without their content. The
    model's own code is copied only if it is trusted. Symbolic links, such as those of a download
    cache, are followed. Raises IncompleteModelFileError if a file of the source is incomplete, and
    NoModelFilesError if the source has been removed.
    """
    if not os.path.isdir(source):
        raise NoModelFilesError(str(source))
    copied = []
    for name, path in _small_files(Path(source), trust_remote_code=trust_remote_code).items():
        target = Path(folder, name)
        if name not in exclude and not _is_whole(target):
            if not _is_whole(path):
                raise IncompleteModelFileError(str(path))
            target.parent.mkdir(exist_ok=True)
            copy_file(path, target)
            copied.append(name)
    return tuple(copied)


def list_model_files(folder: str | Path) -> tuple[str, ...]:
    """Return the names of config, tokenizer and chat templates in a directory."""
    return tuple(_small_files(Path(folder), trust_remote_code=False))


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
    replace_file(Path(folder, "config.json"), config.to_json_string(use_diff=True))


def _save_pretrained(part: Any, folder: Path) -> None:
    """Save a tokenizer or a generation config. transformers itself does not sync its files."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as saved:
        part.save_pretrained(saved)
        for name in sorted(_file_names(Path(saved))):
            (folder / name).parent.mkdir(exist_ok=True)
            copy_file(Path(saved, name), folder / name)


def _is_whole(path: Path) -> bool:
    """Return whether a file exists and, if it is JSON, begins and ends as JSON does.

    A power cut leaves files empty, cut off, or filled with zeros.
    """
    if not path.is_file():
        return False
    if path.suffix != ".json":
        return True
    with open(path, "rb") as file:
        start = file.read(_PROBED_NBYTES).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        file.seek(max(0, os.fstat(file.fileno()).st_size - _PROBED_NBYTES))
        end = file.read().rstrip()[-1:]
    return (start, end) in ((b"{", b"}"), (b"[", b"]"))


def _small_files(source: Path, *, trust_remote_code: bool) -> dict[str, Path]:
    """Find the files of a directory that belong to a model, by their relative paths."""
    patterns = (*_PATTERNS, _CODE_PATTERN) if trust_remote_code else _PATTERNS
    names = sorted(_file_names(source))
    return {
        name: source / name
        for name in names
        if any(_matches(name, pattern) for pattern in patterns)
    }


def _file_names(source: Path) -> set[str]:
    """List the files in the directory and one level below it, as relative paths."""
    paths = [path for pattern in ("*", "*/*") for path in source.glob(pattern)]
    return {path.relative_to(source).as_posix() for path in paths if path.is_file()}


def _matches(name: str, pattern: str) -> bool:
    # fnmatch lets * match a slash, but "tokenizer*" must not match files in a subdirectory.
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)
