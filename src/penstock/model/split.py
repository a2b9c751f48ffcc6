"""A transformers model taken apart into embedding, layers and head. Room: move.

The model's own code computes every part: its layers are lifted out, and probes stand in for them.
Running the model up to the first probe is the embedding, and shows with which arguments each layer
is called; letting a probe answer with what the last layer made runs the head. So position
encodings, scales and caps are the model's own, whatever its family.

Parameters have no memory here. Before a part runs, views of where its weights lie are bound.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.model import attention
from penstock.model.compile import CompiledLayers
from penstock.model.inventory import Inventory
from penstock.model.mlp_tiles import draws_in_tiles, tile_mlps
from penstock.model.varlen_attention import Cuts

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Calls:
    """How one micro-batch's layers are called, beside the hidden states."""

    arguments: Sequence[Arguments]
    bounds: attention.Documents | None


@dataclass(slots=True)
class MicroBatch:
    """Rows computed at once, on the device."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    targets: torch.Tensor
    """What each token is to predict."""
    bounds: attention.Documents | None
    """Where documents begin."""
    number: int
    """Its place in the whole step."""
    calls: Calls | None = None
    """How layers are called for it; known once it was embedded."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, length = self.input_ids.shape
        return rows, length


class _ReachedError(Exception):
    """The last probe was reached: what follows is the head's business."""


class _Probe(nn.Module):
    """Stands where a layer was."""

    def __init__(self, seen: list[Arguments], last: bool, kind: str | None = None) -> None:
        super().__init__()
        self.seen, self.last = seen, last
        self.answer: torch.Tensor | None = None
        self.hidden: torch.Tensor | None = None
        if kind is not None:
            self.attention_type = kind  # some models ask a layer before they call it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.answer is not None:
            return self.answer
        given = dict(kwargs)
        hidden = args[0] if args else given.pop("hidden_states")
        self.hidden = hidden
        self.seen.append((tuple(args[1:]), given))
        if self.last:
            raise _ReachedError
        return hidden


class SplitModel:
    """The parts, and where their weights are bound."""

    def __init__(
        self, model: nn.Module, inventory: Inventory, *, mlp_tile: int, compiled: bool = False
    ) -> None:
        self.model, self.inventory = model, inventory
        attention.register()
        path = inventory.layers[0].name.rpartition(".")[0]
        parent, _, self._list = path.rpartition(".")
        self._base = model.get_submodule(parent)
        found = model.get_submodule(path)
        assert isinstance(found, nn.ModuleList)
        self.layers: list[nn.Module] = list(found)
        self._seen: list[Arguments] = []
        count = len(self.layers)
        self._probes = nn.ModuleList(
            _Probe(self._seen, i == count - 1, getattr(layer, "attention_type", None))
            for i, layer in enumerate(self.layers)
        )
        self._answering = _Probe(self._seen, True)
        self._one = nn.ModuleList([self._answering])
        self._places = _places(model)
        self._shapes = {t.name: t.shape for block in inventory.blocks for t in block.tensors}
        tile_mlps(self.layers, mlp_tile)
        self._compiled = CompiledLayers(self.layers) if compiled else None
        self._tile = mlp_tile
        self._draws_in_tiles = any(draws_in_tiles(layer) for layer in self.layers)
        self.drops_out = self._has_dropout()
        setattr(self._base, self._list, self._one)
        self._head_stand_ins = self._stand_ins()

    # Weights.

    def bind(self, tensors: Mapping[str, nn.Parameter]) -> None:
        """Let modules compute with these, by their names in the state dict."""
        for name, tensor in tensors.items():
            for module, leaf in self._places[name]:
                module._parameters[leaf] = tensor

    def release(self) -> None:
        """Let go of all weights: compiled code may keep modules longer than anybody wants them."""
        for places in self._places.values():
            for module, leaf in places:
                module._parameters[leaf] = None

    def module_of(self, name: str) -> tuple[nn.Module, dict[str, str]]:
        """The module that holds a tensor, and what all it holds is called, by its own names."""
        module, _ = self._places[name][0]
        held = {
            leaf: tensor
            for tensor, places in self._places.items()
            for where, leaf in places
            if where is module
        }
        return module, held

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    # Parts.

    def train(self, training: bool) -> None:
        """Layers too, which are no part of the model while they are lifted out of it."""
        self.model.train(training)
        for layer in self.layers:
            layer.train(training)
        if self._compiled is not None:
            self._compiled.train(training)

    def embed(self, micro: MicroBatch) -> tuple[torch.Tensor, Calls]:
        """What enters the first layer, and how layers are to be called."""
        hidden, arguments = self.enter(
            input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False
        )
        return hidden, Calls(arguments, micro.bounds)

    def enter(self, **inputs: Any) -> tuple[torch.Tensor, list[Arguments]]:
        """What enters the first layer when the model is called so, and how it calls each layer."""
        with self._probing():
            self._seen.clear()
            with contextlib.suppress(_ReachedError):
                self._base(**inputs)
            first = self._probes[0]
            assert isinstance(first, _Probe)
            assert first.hidden is not None
            hidden, arguments = first.hidden, list(self._seen)
            for probe in self._probes:
                probe.hidden = None  # type: ignore[assignment]
        return hidden, arguments

    def layer(self, index: int, hidden: torch.Tensor, calls: Calls) -> torch.Tensor:
        """What leaves layer `index`, counted from 0."""
        args, kwargs = calls.arguments[index]
        bounds = calls.bounds
        cuts = bounds if isinstance(bounds, Cuts) else None
        replays = self._draws_in_tiles and hidden.shape[0] * hidden.shape[1] > self._tile
        # A call for each document would be compiled again for each batch.
        if self._compiled is not None and bounds is cuts and not replays:
            return self._compiled(index, hidden, args, kwargs, cuts)
        with attention.documents(bounds):
            return self.plain_layer(index, hidden, calls.arguments[index])

    def plain_layer(self, index: int, hidden: torch.Tensor, called: Arguments) -> torch.Tensor:
        """The same by the model's own code, never compiled."""
        args, kwargs = called
        out: Any = self.layers[index](hidden, *args, **kwargs)
        found: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] to [tokens, vocabulary], caps and scales included."""
        self._answering.answer = hidden[None]
        positions = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
        try:
            out: Any = self.model(
                inputs_embeds=hidden[None].detach(), position_ids=positions, use_cache=False
            )
        finally:
            self._answering.answer = None
        found: torch.Tensor = out.logits.squeeze(0)
        return found

    def bind_head(self, tensors: Mapping[str, nn.Parameter]) -> None:
        """The head's weights; what only the embedding uses is stood in for by zeros."""
        self.bind(self._head_stand_ins)
        self.bind(tensors)

    @contextlib.contextmanager
    def _probing(self) -> Iterator[None]:
        setattr(self._base, self._list, self._probes)
        try:
            yield
        finally:
            setattr(self._base, self._list, self._one)

    def _has_dropout(self) -> bool:
        config: Any = self.model.config
        rates = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout",
                 "dropout", "attention_probs_dropout_prob", "hidden_dropout_prob")  # fmt: skip
        by_config = any(getattr(config, name, 0.0) for name in rates)
        return by_config or any(m.p > 0 for m in self.model.modules() if isinstance(m, nn.Dropout))

    def _stand_ins(self) -> dict[str, nn.Parameter]:
        """Zeros that take no memory, for the embedding's tensors."""
        device = next((b.device for b in self.model.buffers()), torch.device("cpu"))
        return {
            t.name: nn.Parameter(
                torch.zeros((), dtype=self.dtype, device=device).expand(t.shape),
                requires_grad=False,
            )
            for t in self.inventory.blocks[0].tensors
        }

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.model.config.dtype  # type: ignore[assignment]
        return found


def _places(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Modules that hold each tensor, under its first name as the inventory has it: a tied one is
    held twice."""
    first: dict[int, str] = {}
    found: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for leaf, held in module._parameters.items():
            if held is not None:
                name = first.setdefault(id(held), f"{path}.{leaf}" if path else leaf)
                found.setdefault(name, []).append((module, leaf))
    return found
