"""Check modules that a caller has changed in a live model.

A model's class and config are checked with a twin (`penstock.model.self_check`), which does not
have what a caller has done to the modules of one model: another attention, a function in the place
of a `forward`, a hook, a convolution in front of an MLP. Modules that differ from those that the
class makes are therefore compared here as they are, with their own weights and a few tokens: as
transformers calls them, and as Penstock does.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from penstock.errors import UnsupportedModelError
from penstock.model.attention import DOCUMENTS, attending_over, using_attention
from penstock.model.compile import layer_kinds
from penstock.model.copy_check import has_dropout, has_own_code
from penstock.model.document_attention import Bounds, register_document_attention
from penstock.model.inventory import Inventory
from penstock.model.layer_probe import Arguments, LayerProbes
from penstock.model.meta_model import gpus_of, remember_model, without_parameters
from penstock.model.mlp_tiles import tiled_modules

LENGTH = 12
"""Number of tokens in a row."""

FIRST = 5
"""Number of tokens of the first document of a packed row."""

TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest difference of two results, relative to the largest number in them, by type."""

TOLERANCE_16_BITS = 5e-2

PASSED_ON = ("base_layer", "original_module")
"""Attributes of PEFT's modules with the module that they replace."""

NOT_COMPARED = ("training", "layer_idx", "layer_id", "gradient_checkpointing", "name_or_path")
"""Attributes that differ between models of one class."""


class ChangedModuleWarning(UserWarning):
    """A module that was changed could not be run, to see whether Penstock computes it right."""


def check_changed_modules(model: nn.Module, inventory: Inventory, *, runs_head: bool) -> Inventory:
    """Return the inventory of a live model with what its changed modules have shown.

    `runs_head` is set if the engine computes the logits, and not the caller's own code.
    """
    if inventory.not_trainable or any(p.is_meta for p in model.parameters()):
        return inventory
    changed = _find_changed(model)
    if not changed:
        return inventory
    path = inventory.layers[0].name.rpartition(".")[0]
    start = f"{path}."
    numbers = sorted({int(c[len(start) :].split(".")[0]) for c in changed if c.startswith(start)})
    outside = [name for name in changed if not name.startswith(start)]
    if numbers:
        # The twin has shown what backward does not need. A function around it may need that.
        blocks = tuple(replace(block, unneeded=()) for block in inventory.blocks)
        # The config says whether attention has dropout, which the kernels do not support.
        parts = map(model.get_submodule, changed)
        drops = any(has_dropout(part) for part in parts if not isinstance(part, nn.Dropout))
        plain = inventory.plain_attention and not drops
        inventory = replace(inventory, blocks=blocks, plain_attention=plain)
    with _left_alone(model):
        check = _Check(model, inventory, path, changed)
        try:
            mixes = check.layers(numbers)
            if outside:
                mixes = mixes or check.embedding()
                check.head(whole=runs_head)
        except UnsupportedModelError as problem:
            return replace(inventory, not_trainable=str(problem))
        except Exception as problem:  # the code around the layers may raise any exception
            _warn(" or ".join(outside), problem)
            mixes = ""
    return replace(inventory, mixes_documents=inventory.mixes_documents or mixes)


def _warn(name: str, problem: Exception) -> None:
    warnings.warn(
        f"{name} was changed, and could not be run to see whether Penstock computes it right: "
        f"{type(problem).__name__}: {problem}",
        ChangedModuleWarning, stacklevel=3,
    )  # fmt: skip


# What was changed.


def _find_changed(model: nn.Module) -> list[str]:
    """Return the paths of modules that differ from those that the model's class makes."""
    make: Any = type(model)
    try:
        with torch.device("meta"), without_parameters():
            made: nn.Module = make._from_config(copy.deepcopy(model.config))
    except Exception:  # a class with other arguments; its twin cannot be built either
        return []
    expected = dict(made.named_modules(remove_duplicate=False))
    found = dict(_modules(model, ""))
    missing = {name.rpartition(".")[0] for name in expected.keys() - found.keys()}
    return [
        name
        for name, module in found.items()
        if name in missing
        or name not in expected
        or type(module) is not type(expected[name])
        or (has_own_code(module) and not has_own_code(expected[name]))
        or _attributes(module) != _attributes(expected[name])
    ]


def _modules(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with their paths, and what PEFT's modules replace in their places."""
    if type(module).__module__.startswith("peft."):
        inner = (getattr(module, name, None) for name in PASSED_ON)
        replaced = next((each for each in inner if isinstance(each, nn.Module)), None)
        if replaced is not None:
            yield from _modules(replaced, path)
            return
    yield path, module
    for name, child in module.named_children():
        yield from _modules(child, f"{path}.{name}" if path else name)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the numbers and texts of a module, and the kinds of functions that it has."""
    return {
        name: value if isinstance(value, int | float | str | bool | None) else type(value)
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in NOT_COMPARED
        if isinstance(value, int | float | str | bool | None) or callable(value)
        if name != "forward"  # of which `has_own_code` tells whose it is
    }


@contextlib.contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Run modules inside the block without dropout, and leave the model as it was."""
    restore = remember_model(model)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=gpus_of(model)):
            model.eval()
            yield
    finally:
        restore()


# Comparisons.


class _Check:
    """Runs changed modules in both ways. Raises UnsupportedModelError for differences."""

    def __init__(
        self, model: nn.Module, inventory: Inventory, path: str, changed: Sequence[str]
    ) -> None:
        register_document_attention()
        self._model, self._inventory, self._path = model, inventory, path
        self._changed = changed
        self._layers: list[nn.Module] = list(model.get_submodule(path))  # type: ignore[call-overload]
        self._probes = LayerProbes(model, path)
        limit = inventory.max_context
        self._length = LENGTH if limit is None else min(LENGTH, limit)
        self._first = min(FIRST, self._length // 2)
        table: Any = model.get_input_embeddings()  # type: ignore[operator]
        self._device = table.weight.device
        generator = torch.Generator().manual_seed(5)
        drawn = torch.randint(inventory.vocabulary, (2, 1, self._length), generator=generator)
        self._ids, self._others = drawn.to(self._device)
        self._positions = torch.arange(self._length, device=self._device)[None]
        start = torch.where(self._positions < self._first, 0, self._first)
        self._packed = self._positions - start
        self._generator = generator

    def layers(self, numbers: Sequence[int]) -> str:
        """Compare layers; return what carries information between documents, or ""."""
        kinds, mixes = layer_kinds(self._layers), ""
        firsts = {kinds[number]: number for number in reversed(numbers)}
        for number in sorted(firsts.values()):
            mixes = self._layer(number) or mixes
        return mixes

    def _layer(self, number: int) -> str:
        """Compare one layer, for one document and for two."""
        layer, name = self._layers[number], f"{self._path}.{number}"
        rows = self._random(2, layer)
        others = self._random(2, layer)
        own = self._inventory.own_attention
        try:
            expected = self._run(layer, rows[:1], self._arguments(number, self._positions))
        except Exception as problem:  # such as a kernel for a GPU, of a model in host memory
            _warn(name, problem)
            return ""
        if own:  # it runs as it is, once for each document
            return ""
        with using_attention([self._model.config], DOCUMENTS):
            alone = self._arguments(number, self._positions)
            packed = self._arguments(number, self._packed)

            def run(hidden: torch.Tensor, bounds: Bounds | None = None) -> torch.Tensor:
                return self._run(layer, hidden, packed if bounds else alone, bounds)

            try:
                got = run(rows[:1])
            except Exception as problem:  # the module's own code may raise any exception
                raise UnsupportedModelError(
                    f"{self._names(name)} cannot be run with Penstock's attention: "
                    f"{type(problem).__name__}: {problem}"
                ) from None
            if not _close(got, expected):
                raise UnsupportedModelError(
                    f"{self._names(name)} computes something else with Penstock's attention, "
                    f"which gets no mask, than with that of transformers. Attention code must call "
                    f"the function that its config names (ALL_ATTENTION_FUNCTIONS)"
                )
            later = torch.cat([rows[:1, : self._first], others[:1, self._first :]], dim=1)
            if not _close(run(later)[:, : self._first], got[:, : self._first]):
                raise UnsupportedModelError(f"{self._names(name)} looks at later tokens")
            if not _close(run(torch.cat([rows[:1], others[:1]]))[:1], got):
                raise UnsupportedModelError(
                    f"{self._names(name)} mixes the sequences of a batch, which Penstock splits"
                )
            self._check_repeats(layer, name, lambda: run(rows[:1]))
            self._check_tiles(layer, name)
            bounds = [[0, self._first, self._length]]
            earlier = torch.cat([others[:1, : self._first], rows[:1, self._first :]], dim=1)
            both = (run(each, bounds)[:, self._first :] for each in (rows[:1], earlier))
            return "" if _close(*both) else self._names(name)

    def _check_repeats(self, layer: nn.Module, name: str, run: Callable[[], torch.Tensor]) -> None:
        """Raise UnsupportedModelError if a layer in training depends on how often it has run."""
        layer.train()
        first, second = run(), run()
        layer.eval()
        if not _close(second, first):
            raise UnsupportedModelError(
                f"{self._names(name)} computes something else in every call, but backward runs a "
                f"layer again, and Penstock runs it once for each micro-batch"
            )

    def _check_tiles(self, layer: nn.Module, name: str) -> None:
        """Raise UnsupportedModelError if a module mixes tokens that is computed in tiles."""
        for path, module in tiled_modules(layer):
            whole = f"{name}.{path}"
            if not any(each == whole or each.startswith(f"{whole}.") for each in self._changed):
                continue
            hidden = self._random(1, layer)
            try:
                out = module(hidden)
                parts = (module(hidden[:, : self._first]), module(hidden[:, self._first :]))
            except TypeError:  # experts take more
                continue
            if not _close(torch.cat(parts, dim=1), out):
                raise UnsupportedModelError(
                    f"{self._names(whole)} mixes tokens, but Penstock computes {path} in tiles of "
                    f"tokens. Let another module of the layer do that"
                )

    def embedding(self) -> str:
        """Return what lets the embedding of a document depend on another one in its row."""
        first = slice(None, self._first)
        changed = self._ids.clone()
        changed[:, first] = self._others[:, first]
        with self._attention():
            before, after = (self._enter(ids, self._packed)[0] for ids in (self._ids, changed))
        second = slice(self._first, None)
        return "" if _close(after[:, second], before[:, second]) else self._outside()

    def head(self, *, whole: bool) -> None:
        """Raise UnsupportedModelError if what follows the layers mixes tokens.

        `whole` is set if that includes the logits.
        """
        width, probes = self._inventory.hidden, self._probes
        hidden = self._draw(1, self._length, width, like=self._like(self._model))
        table: Any = self._model.get_input_embeddings()  # type: ignore[operator]
        embeddings = hidden.new_zeros(1, self._length, table.weight.shape[-1])
        inputs = {"inputs_embeds": embeddings, "position_ids": self._positions, "use_cache": False}
        call: Any = self._model if whole else probes.base
        with self._attention():
            self._enter(self._ids, self._positions)  # tells whether layers return tuples
            outs = [
                _tensor(probes.run_head(each, lambda: call(**inputs)), whole=whole)
                for each in (hidden, hidden.flip(1))
            ]
        if not _close(outs[1].flip(1), outs[0]):
            raise UnsupportedModelError(
                f"{self._outside()} mixes tokens after the last layer, which Penstock computes in "
                f"chunks of tokens"
            )

    def _attention(self) -> contextlib.AbstractContextManager[None]:
        if self._inventory.own_attention:
            return contextlib.nullcontext()
        return using_attention([self._model.config], DOCUMENTS)

    def _run(
        self, layer: nn.Module, hidden: torch.Tensor, called: Arguments,
        bounds: Bounds | None = None,
    ) -> torch.Tensor:  # fmt: skip
        self._seed()
        with attending_over(bounds):
            out: Any = layer(hidden.clone(), *called[0], **called[1])
        output: torch.Tensor = out[0] if isinstance(out, tuple | list) else out
        return output

    def _seed(self) -> None:
        """Let a module that draws random numbers draw the same ones in every call."""
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed all GPUs
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(0)

    def _arguments(self, number: int, positions: torch.Tensor) -> Arguments:
        return self._enter(self._ids, positions)[1][number]

    def _enter(
        self, ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, list[Arguments]]:
        found = self._probes.enter(input_ids=ids, position_ids=positions, use_cache=False)
        self._probes.clear()
        return found

    def _random(self, rows: int, layer: nn.Module) -> torch.Tensor:
        return self._draw(rows, self._length, self._inventory.hidden, like=self._like(layer))

    def _like(self, module: nn.Module) -> torch.Tensor:
        return next((p for p in module.parameters()), self._positions.float())

    def _draw(self, *shape: int, like: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=self._generator)
        return drawn.to(device=like.device, dtype=like.dtype)

    def _names(self, start: str) -> str:
        """Return the changed modules at a path, for messages."""
        inside = [n for n in self._changed if n == start or n.startswith(f"{start}.")]
        return f"{inside[0]}, which was changed in the live model," if inside else start

    def _outside(self) -> str:
        names = [n for n in self._changed if not n.startswith(f"{self._path}.")]
        outer = [n for n in names if n.rpartition(".")[0] not in names]
        return f"{' or '.join(outer)}, which was changed in the live model,"


def _tensor(out: Any, *, whole: bool) -> torch.Tensor:
    found: torch.Tensor = out.logits if whole else out[0]
    return found


def _close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    if got.shape != expected.shape:
        return False
    tolerance = TOLERANCES.get(expected.dtype, TOLERANCE_16_BITS)
    difference = float((got.float() - expected.float()).abs().max())
    return difference <= tolerance * float(expected.float().abs().max())
