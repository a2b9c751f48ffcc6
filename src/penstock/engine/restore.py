"""Give trained weights to a model in memory."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from penstock.checkpoint.disk import check_room
from penstock.engine.rank_agreement import all_or_none
from penstock.engine.state_view import StateView
from penstock.engine.transport import Transport
from penstock.errors import EngineError, ModelRestoreError
from penstock.machine.limits import host_memory
from penstock.machine.sysfs import System
from penstock.model.live_model import LiveModel, ReadWeight
from penstock.model.split import find_holders

TRAINING = (
    "has no weights now: they are in the engine that trains it. To train, call engine.step(batch); "
    "for a loss, engine.evaluate(batches); to save, engine.write(folder). For everything else, "
    "engine.restore(model) gives it a copy of the weights as they are now, and engine.close() the "
    "trained weights"
)

SHELL = (
    "has no weights: its engine could not give them back when it was closed. Load what "
    "engine.write(folder) saved with AutoModelForCausalLM.from_pretrained(folder)"
)


class ModelNotRestoredWarning(UserWarning):
    """A model that was passed to `prepare` has no weights after `close`, or on another device."""


def restore_live(live: LiveModel, read: ReadWeight) -> None:
    """Give a model its weights back, in host memory. Raise ModelRestoreError if they do not fit."""
    check_host_memory(type(live.model).__name__, live.nbytes)
    live.load(read)


class SpilledWeights:
    """Weights on disk, one file per tensor, while an engine releases the memory they need."""

    def __init__(self, live: LiveModel, state: StateView, folder: str | Path) -> None:
        check_room(folder, live.nbytes)
        self._folder = tempfile.TemporaryDirectory(dir=folder, prefix=".penstock-weights-")
        self._paths = {n: Path(self._folder.name, str(i)) for i, n in enumerate(live.missing)}
        for name, dtype in live.missing.items():
            save_file({"weight": state.weight(name, dtype)}, self._paths[name])

    def load(self, live: LiveModel) -> None:
        """Give the weights back, and remove the files."""
        with self._folder:
            restore_live(live, lambda name, _: load_file(self._paths[name])["weight"])


def check_host_memory(name: str, needed: int) -> None:
    """Raise ModelRestoreError if a copy of the weights does not fit in host memory."""
    free = host_memory(System()).free
    if needed > free:
        raise ModelRestoreError(name, wanted=needed, free=free)


def load_into(model: nn.Module, state: StateView) -> None:
    """Copy the weights into another model with the same tensors, in place."""
    holders = find_holders(model)
    targets = {name: pair[0][0]._parameters[pair[0][1]] for name, pair in holders.items()}
    _check_same(targets, state)
    with torch.no_grad():
        for name, parameter in targets.items():
            assert parameter is not None
            parameter.copy_(state.weight(name, parameter.dtype))


def _check_same(targets: Mapping[str, nn.Parameter | None], state: StateView) -> None:
    if missing := sorted(set(state) ^ set(targets)):
        raise EngineError(
            f"the model and the engine have different tensors: {missing[0]} is only in "
            f"{'the engine' if missing[0] in state else 'the model'}"
        )
    for name, parameter in targets.items():
        assert parameter is not None
        if parameter.shape != state.shape(name) or parameter.is_meta:
            has = "no memory" if parameter.is_meta else f"the shape {tuple(parameter.shape)}"
            raise EngineError(
                f"{name} has {has} in the model, and the shape {state.shape(name)} in the engine"
            )


@contextlib.contextmanager
def giving_back(
    live: LiveModel, state: StateView, spill: str | Path | None, ranks: Transport, copies: int
) -> Iterator[None]:
    """Give a model its weights back; the engine releases its memory inside the block.

    Without enough memory next to the engine, the weights wait in the directory `spill`. If they
    cannot be given back, a warning says so, and the engine still releases its memory. All ranks
    call this: `copies` of them are on this machine, and each has the model.
    """
    spilled: SpilledWeights | None = None
    problem: Exception | None = None
    try:
        spills = _must_spill(live, ranks, copies, can_spill=spill is not None)
    except Exception as error:  # on all ranks
        problem = error
    else:
        try:
            if spills:
                assert spill is not None
                spilled = SpilledWeights(live, state, spill)
            else:
                restore_live(live, state.weight)
        except Exception as error:  # also an I/O error
            problem = error
            ranks.abort(error)  # the others may wait for tensors of this rank
    yield
    try:
        if spilled is not None:
            spilled.load(live)
    except Exception as error:
        problem = error
    if problem is None:
        move_back(live)
        return
    live.guard(SHELL)
    text = f"the model that was passed to prepare has no weights now: {problem}"
    warnings.warn(text, ModelNotRestoredWarning, stacklevel=4)


def _must_spill(live: LiveModel, ranks: Transport, copies: int, *, can_spill: bool) -> bool:
    """Decide for all ranks whether the weights wait on disk until the engine's memory is free."""
    needed = copies * live.nbytes
    with all_or_none(ranks):
        free = host_memory(System()).free
        if needed > free and not can_spill:
            raise ModelRestoreError(type(live.model).__name__, wanted=needed, free=free)
    return b"\1" in ranks.meet(b"\1" if needed > free else b"\0")


def move_back(live: LiveModel) -> None:
    """Move a model to the devices where it was; it stays in host memory if it does not fit."""
    try:
        live.move_to_former_devices()
    except torch.cuda.OutOfMemoryError:
        warnings.warn(
            f"the trained {type(live.model).__name__} stays in host memory: the GPU has too little "
            f"free memory for its weights",
            ModelNotRestoredWarning,
            stacklevel=4,
        )
