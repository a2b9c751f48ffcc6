"""A small save with everything a real one has, and a disk that fails at the n-th call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

from penstock.checkpoint.manifest import Checkpoint
from penstock.checkpoint.reader import ShardReader
from penstock.checkpoint.run_directory import new_checkpoint
from penstock.checkpoint.training_state import Software, TrainingState
from penstock.checkpoint.writer import ShardWriter
from tests.support.safetensors_files import read, same_bits, tensor_out

CALLS = ("open", "pwrite", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir")
"""Of the module os: what changes a disk, or makes a change last."""

STATE = TrainingState(software=Software())


def tensors_of(step: int, stem: str) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(step)
    return {f"{stem}.{i}": torch.randn(64, generator=chance) for i in range(3)}


def fill(folder: Path, step: int, *, optimizer: bool = True) -> None:
    for stem in ("model", "optimizer") if optimizer else ("model",):
        outs = [tensor_out(name, t, 100) for name, t in tensors_of(step, stem).items()]
        private = stem == "optimizer"
        ShardWriter(outs, stem=stem, private=private, max_shard_nbytes=512).write(folder)
    STATE.save(folder)
    (folder / "config.json").write_text("{}")


def save(out: Path, step: int, *, keep: int = 2, optimizer: bool = True) -> None:
    with new_checkpoint(out, step, keep=keep, nbytes=4096) as folder:
        fill(folder, step, optimizer=optimizer)


def check_contents(found: Checkpoint) -> None:
    for stem in ("model", "optimizer") if found.resumable else ("model",):
        with ShardReader(found.path, stem) as reader:
            for name, tensor in tensors_of(found.step, stem).items():
                assert same_bits(read(reader, name), tensor)
    assert TrainingState.load(found.path) == STATE


@contextmanager
def acting_at(number: int, act: Callable[[str, tuple[object, ...]], None]) -> Iterator[list[str]]:
    """`act` before the call of that number, counted from 1. The list has the calls that came."""
    came: list[str] = []

    def watch(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **more: object) -> object:
            came.append(name)
            if len(came) == number:
                act(name, args)
            return real(*args, **more)

        return call

    with patch.multiple(os, **{name: watch(name, getattr(os, name)) for name in CALLS}):
        yield came
