"""A small save with all kinds of files, and a hook at its n-th call that changes the disk."""

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
"""Functions of `os` that change a disk or make a change durable."""

STATE = TrainingState(software=Software())


def tensors_of(step: int, stem: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"{stem}.{i}": torch.randn(64, generator=generator) for i in range(3)}


def fill(folder: Path, step: int, *, optimizer: bool = True) -> None:
    for stem in ("model", "optimizer") if optimizer else ("model",):
        outs = [tensor_out(name, t, 100) for name, t in tensors_of(step, stem).items()]
        private = stem == "optimizer"
        ShardWriter(outs, stem=stem, private=private, max_shard_nbytes=512).write(folder)
    STATE.save(folder)
    (folder / "config.json").write_text("{}")


def save(
    out: Path, step: int, *, keep: int = 2, optimizer: bool = True, keep_resumable: int = 1
) -> None:
    """Save a checkpoint. One resumable checkpoint is the most interesting number to kill."""
    kept = {"keep": keep, "keep_resumable": keep_resumable}
    with new_checkpoint(out, step, nbytes=4096, **kept) as folder:
        fill(folder, step, optimizer=optimizer)


def check_contents(checkpoint: Checkpoint) -> None:
    for stem in ("model", "optimizer") if checkpoint.resumable else ("model",):
        with ShardReader(checkpoint.path, stem) as reader:
            for name, tensor in tensors_of(checkpoint.step, stem).items():
                assert same_bits(read(reader, name), tensor)
    assert TrainingState.load(checkpoint.path) == STATE


@contextmanager
def acting_at(number: int, act: Callable[[str, tuple[object, ...]], None]) -> Iterator[list[str]]:
    """Call `act` before the call of that number, counted from 1. Yield the list of calls so far."""
    calls: list[str] = []

    def wrap(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **more: object) -> object:
            calls.append(name)
            if len(calls) == number:
                act(name, args)
            return real(*args, **more)

        return call

    with patch.multiple(os, **{name: wrap(name, getattr(os, name)) for name in CALLS}):
        yield calls
