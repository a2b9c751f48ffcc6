"""Split a transformers model into embedding, layers and head.

The model's own code computes every part. The layers are lifted out of the model, and probes take
their places. Running the model up to the last probe computes the embedding, and records the
arguments with which the model calls each layer. Letting a probe return the output of the last layer
runs the head. So position encodings, scales and caps are the model's own in every model family.

Parameters have no memory here. Before a part runs, views of its weights are bound to its modules.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.model.attention import attending_over
from penstock.model.compile import Body, CompiledLayers, Kind, layer_kinds
from penstock.model.copy_check import may_draw
from penstock.model.document_attention import (
    Documents,
    PaddedRows,
    TwoWaySpans,
    register_document_attention,
)
from penstock.model.embedding_noise import EmbeddingNoise
from penstock.model.experts import Routing, noting_routing, tap_routers, use_experts_function
from penstock.model.inventory import Inventory
from penstock.model.layer_probe import Arguments, LayerProbes
from penstock.model.mlp_tiles import (
    differentiated_in_tiles,
    draws_in_tiles,
    set_training,
    tile_mlps,
)
from penstock.model.parameter_adapters import replace_parametrizations
from penstock.model.router_loss import RouterLoss, RouterSums, head_options
from penstock.model.unneeded_outputs import skip_products
from penstock.model.varlen_attention import DocumentSpans


@dataclass(frozen=True, slots=True)
class Calls:
    """How the layers are called for one micro-batch, in addition to the hidden states."""

    arguments: Sequence[Arguments]
    """The arguments of each layer. Empty if layers compute attention with their own code: their
    masks have an entry for each pair of tokens, so every call makes its arguments again."""
    bounds: Documents | None
    """Start positions of documents; None if each row is one document."""
    tokens: tuple[torch.Tensor, torch.Tensor]
    """Token ids and positions, from which the model makes the arguments."""


class Features(NamedTuple):
    """The output of a multimodal model's towers, for the tokens that stand for images or sound."""

    embeddings: torch.Tensor
    """`[rows, tokens, hidden size]`; what is not in `positions` has no meaning."""
    positions: torch.Tensor
    """`[rows, tokens]`: True for tokens whose embedding is replaced."""


@dataclass(slots=True)
class MicroBatch:
    """Rows that are computed together, on the device."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    """`[rows, tokens]`, or several such positions of each token, as models with images have."""
    targets: torch.Tensor
    """The token that each position has to predict."""
    bounds: Documents | None
    """Start positions of documents; None if each row is one document."""
    number: int
    """Position of the micro-batch in the whole step."""
    calls: Calls | None = None
    """How layers are called for it; known after the embedding."""
    noise_scales: torch.Tensor | None = None
    """Scale of the noise on each token's embedding; None without noise (`embedding_noise`)."""
    noise_key: int = 0
    """Decides the random numbers of the noise."""
    mask: torch.Tensor | None = None
    """True for tokens and False for padding, on the host; None if there is no padding."""
    router_sums: RouterSums | None = None
    """What the routers of layers did, for the auxiliary loss; None without one."""
    features: Features | None = None
    """What takes the place of tokens that stand for images; None without images."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, length = self.input_ids.shape
        return rows, length


class SplitModel:
    """The parts of a model, and the modules to which their weights are bound.

    `mlp_tile` is the number of tokens that an MLP processes at a time; with `compiled`, layers run
    by compiled code where possible. With `deterministic`, every compilation gives that code the
    same kernels. `noise_alpha` is the strength of the noise on embeddings; 0 for none. With
    `recomputes`, layers can skip what backward does not need (`skipping_unneeded`).
    """

    def __init__(
        self,
        model: nn.Module,
        inventory: Inventory,
        *,
        mlp_tile: int,
        compiled: bool = False,
        deterministic: bool = True,
        noise_alpha: float = 0.0,
        recomputes: bool = False,
    ) -> None:
        self.model, self.inventory = model, inventory
        register_document_attention()
        path = inventory.layers[0].name.rpartition(".")[0]
        layers = model.get_submodule(path)
        assert isinstance(layers, nn.ModuleList)
        self.layers: list[nn.Module] = list(layers)
        self._probes = LayerProbes(model, path)
        base = self._probes.base
        self._noise = EmbeddingNoise(model, base, noise_alpha) if noise_alpha else None
        self._holders = find_holders(model)
        buffers = dict(model.named_buffers(remove_duplicate=False))
        self.buffers = {tensor.name: buffers[tensor.name] for tensor in inventory.buffers}
        """Tensors of the state dict that are no parameters, by name."""
        self._shapes = {t.name: t.shape for block in inventory.blocks for t in block.tensors}
        # Narrower than the hidden states in models that project the embedding, such as OPT-350m.
        table = f"{inventory.blocks[0].name}.weight"
        self.embedding_width = self._shapes.get(table, (inventory.hidden,))[-1]
        use_experts_function(self.layers)
        replace_parametrizations(self.layers)
        self.router_loss = RouterLoss.of(model.config)
        """The auxiliary loss of the model's routers, if its config asks for it."""
        if self.router_loss is not None and not tap_routers(model, self.layers):
            self.router_loss = None  # no layer has a router
        self.layer_kinds: list[Kind] = layer_kinds(self.layers)
        """The kind of each layer: equal for layers that run the same code."""
        unneeded = [block.unneeded if recomputes else () for block in inventory.layers]
        tile_mlps(self.layers, mlp_tile, unneeded)
        # After the tiles, which have copies of the modules as they were.
        for layer, paths in zip(self.layers, unneeded, strict=True):
            in_tiles = differentiated_in_tiles(layer)
            skip_products(m for m in _submodules(layer, paths) if m not in in_tiles)
        # Before weights are bound: compiled layers keep copies of the layers as they are now.
        self._compiled = (
            CompiledLayers(self.layers, deterministic=deterministic) if compiled else None
        )
        self._tile = mlp_tile
        self._draws_in_tiles = any(draws_in_tiles(layer) for layer in self.layers)
        self.drops_out = self._has_dropout()
        """Whether the model has dropout anywhere, or code that may draw random numbers."""
        # Last: everything above looks at all modules of the model, layers included.
        self._probes.install()
        self._placeholders: dict[torch.device, dict[str, nn.Parameter]] = {}
        self._mode: bool | None = None
        """The mode that `train` has set last."""

    # Weights

    def bind(self, tensors: Mapping[str, nn.Parameter]) -> None:
        """Make modules compute with these weights, named as in the state dict."""
        for name, tensor in tensors.items():
            for module, leaf in self._holders[name]:
                module._parameters[leaf] = tensor

    def release(self) -> None:
        """Drop all weights. Compiled code may keep the modules alive, and must not keep weights."""
        for holders in self._holders.values():
            for module, leaf in holders:
                module._parameters[leaf] = None

    def module_of(self, name: str) -> tuple[nn.Module, dict[str, str]]:
        """Return the module that holds a tensor, and all its tensors: local name to full name."""
        module, _ = self._holders[name][0]
        names = {
            leaf: tensor
            for tensor, holders in self._holders.items()
            for holder, leaf in holders
            if holder is module
        }
        return module, names

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._shapes[name]

    # Parts

    def train(self, training: bool) -> None:
        """Set training mode in the model and in its layers, which were lifted out of it."""
        # Looking is faster than setting, and most steps find the mode that they need.
        # A caller's own `eval` does not reach the copies that tiled MLPs and compiled layers call,
        # so the mode that was set last must match as well.
        modules = (m for part in (self.model, *self.layers) for m in part.modules())
        if self._mode is training and all(module.training is training for module in modules):
            return
        self._mode = training
        self.model.train(training)
        for layer in self.layers:
            set_training(layer, training)
        if self._compiled is not None:
            self._compiled.train(training)

    def embed(self, micro: MicroBatch) -> tuple[torch.Tensor, Calls]:
        """Compute the input of the first layer, and how each layer has to be called."""
        tokens = (micro.input_ids, micro.position_ids)
        with self._with_noise(micro):
            hidden, arguments = self._enter_with(*tokens, features=micro.features)
        kept = [] if self.inventory.own_attention else arguments
        return hidden, Calls(kept, micro.bounds, tokens)

    def _with_noise(self, micro: MicroBatch) -> contextlib.AbstractContextManager[None]:
        if self._noise is None or not self.model.training:
            return contextlib.nullcontext()
        assert micro.noise_scales is not None
        return self._noise.added(micro.noise_key, micro.noise_scales)

    def check_noise(self, device: torch.device) -> None:
        """Raise UnsupportedModelError if the model's embedding cannot take the noise."""
        if self._noise is None:
            return
        ids, positions = torch.zeros(2, 1, 2, dtype=torch.int64, device=device)
        positions[0, 1] = 1
        scales = torch.ones(1, 2, device=device)
        micro = MicroBatch(ids, positions, ids, None, number=0, noise_scales=scales)
        self.train(True)
        with torch.no_grad(), self._embedding_replaced(device):
            self.embed(micro)

    def enter(self, **inputs: Any) -> tuple[torch.Tensor, list[Arguments]]:
        """Run the model up to its layers; return their input and how it calls each of them."""
        found = self._probes.enter(**inputs)
        self._probes.clear()  # do not keep hidden states alive
        return found

    def _enter_with(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, features: Features | None = None
    ) -> tuple[torch.Tensor, list[Arguments]]:
        inputs = {"input_ids": input_ids, "position_ids": position_ids}
        if features is not None:
            table: Any = self.model.get_input_embeddings()  # type: ignore[operator]
            own = table(inputs.pop("input_ids"))
            positions = features.positions[:, :, None]
            inputs["inputs_embeds"] = torch.where(positions, features.embeddings, own)
        if self.inventory.own_attention:
            inputs["attention_mask"] = _all_tokens(input_ids)
        return self.enter(**inputs, use_cache=False)

    def start_router_sums(self, micro: MicroBatch) -> None:
        """Let a micro-batch begin to sum up what routers do, if the model has a loss for it."""
        if self.router_loss is not None:
            mask = None if micro.mask is None else micro.mask.to(micro.input_ids.device)
            micro.router_sums = RouterSums(self.router_loss, mask)

    def layer(self, index: int, hidden: torch.Tensor, calls: Calls) -> torch.Tensor:
        """Compute the output of layer `index`, counted from 0."""
        return self.routed_layer(index, hidden, calls)[0]

    def routed_layer(
        self, index: int, hidden: torch.Tensor, calls: Calls
    ) -> tuple[torch.Tensor, Routing]:
        """Compute the output of layer `index`, and what it says about its experts."""
        if self.inventory.own_attention:
            return self._layer_by_document(index, hidden, calls), Routing()
        if self._compiled is not None and self._can_compile(hidden, calls):
            documents = calls.bounds if isinstance(calls.bounds, DocumentSpans) else None
            return self._compiled(index, hidden, *calls.arguments[index], documents)
        with attending_over(calls.bounds), noting_routing() as notes:
            out = self.plain_layer(index, hidden, calls.arguments[index])
        return out, Routing(**notes)

    def _layer_by_document(self, index: int, hidden: torch.Tensor, calls: Calls) -> torch.Tensor:
        """Compute the output of a layer with its own attention code, one call for each document.

        The layer gets what the model passes to it for that document alone. So masks, distances and
        positions are the model's own, whatever they are made of. Rows of one document each are
        computed in one call.
        """
        if calls.bounds is None:
            return self.plain_layer(index, hidden, self._make_arguments(index, *calls.tokens))
        spans = DocumentSpans | TwoWaySpans
        assert not isinstance(calls.bounds, spans), "own attention code takes no spans"
        bounds = calls.bounds.bounds if isinstance(calls.bounds, PaddedRows) else calls.bounds
        lengths = [e - s for marks in bounds for s, e in itertools.pairwise(marks)]
        # Split and joined by one operation each: slices would each get a gradient of full size.
        parts = zip(
            *(torch.split(t.flatten(0, 1), lengths) for t in (hidden, *calls.tokens)), strict=True
        )
        outputs = [
            self.plain_layer(index, part[None], self._make_arguments(index, ids[None], at[None]))
            for part, ids, at in parts
        ]
        return torch.cat(outputs, dim=1).view(hidden.shape)

    def _make_arguments(
        self, index: int, input_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> Arguments:
        """Return the arguments that the model passes to a layer for these tokens.

        They depend on no parameters, so those of the embedding need not be on the device.
        """
        with torch.no_grad(), self._embedding_replaced(input_ids.device):
            return self._enter_with(input_ids, position_ids)[1][index]

    @contextlib.contextmanager
    def _embedding_replaced(self, device: torch.device) -> Iterator[None]:
        """Bind zeros in place of the embedding's parameters inside the block."""
        placeholders = self._make_placeholders(device)
        holders = [holder for name in placeholders for holder in self._holders[name]]
        before = [module._parameters[leaf] for module, leaf in holders]
        self.bind(placeholders)
        try:
            yield
        finally:
            for (module, leaf), parameter in zip(holders, before, strict=True):
                module._parameters[leaf] = parameter

    def compiled_call(
        self, index: int, hidden: torch.Tensor, calls: Calls
    ) -> tuple[Body, tuple[Any, ...]] | None:
        """Return the function that is compiled for this call of a layer, and its arguments.

        None, if the layer runs without compiled code.
        """
        if self._compiled is None or not self._can_compile(hidden, calls):
            return None
        documents = calls.bounds if isinstance(calls.bounds, DocumentSpans) else None
        return self._compiled.plain_call(index, hidden, *calls.arguments[index], documents)

    def _can_compile(self, hidden: torch.Tensor, calls: Calls) -> bool:
        # Compiled code takes documents as a tensor only. With one call per document it would
        # be specialized for the documents of each batch. Tiles that replay dropout run eagerly.
        if self.inventory.own_attention:
            return False
        as_tensor = calls.bounds is None or isinstance(calls.bounds, DocumentSpans)
        replays = self._draws_in_tiles and hidden.shape[0] * hidden.shape[1] > self._tile
        return as_tensor and not replays

    def plain_layer(self, index: int, hidden: torch.Tensor, called: Arguments) -> torch.Tensor:
        """Compute the output of a layer with the model's own code, never compiled."""
        args, kwargs = called
        out: Any = self.layers[index](hidden, *args, **kwargs)
        output: torch.Tensor = out[0] if isinstance(out, tuple | list) else out
        return output

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the head: `[tokens, hidden]` to `[tokens, vocabulary]`, with its caps and scales."""
        # A probe returns `hidden` in place of the layers' output, so gradients reach it. The
        # embeddings passed to the model only have to have the right shape, but they need memory of
        # their own: some models, such as CTRL, scale them in place. A model with its own attention
        # code makes a mask for the embeddings, of all pairs of them, so it gets a single one.
        tokens = 1 if self.inventory.own_attention else hidden.shape[0]
        positions = torch.zeros(1, tokens, dtype=torch.int64, device=hidden.device)
        embeddings = hidden.new_zeros(1, tokens, self.embedding_width)
        inputs = {"inputs_embeds": embeddings, "position_ids": positions, "use_cache": False}
        if self.inventory.own_attention:
            inputs["attention_mask"] = _all_tokens(positions)
        inputs |= head_options(self.model.config)
        out = self._probes.run_head(hidden[None], lambda: self.model(**inputs))
        logits: torch.Tensor = out.logits.flatten(0, 1)
        return logits

    @property
    def layers_return_tuples(self) -> bool:
        """Whether the model's layers return tuples; known after `embed`."""
        return self._probes.return_tuples

    def bind_head(self, tensors: Mapping[str, nn.Parameter]) -> None:
        """Bind the head's weights, and zeros in place of weights that only the embedding uses."""
        self.bind(self._make_placeholders(next(iter(tensors.values())).device))
        self.bind(tensors)

    def _has_dropout(self) -> bool:
        config: Any = self.model.config
        rates = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout",
                 "dropout", "attention_probs_dropout_prob", "hidden_dropout_prob")  # fmt: skip
        by_config = any(getattr(config, name, 0.0) for name in rates)
        return by_config or any(map(may_draw, self.model.modules()))

    def _make_placeholders(self, device: torch.device) -> dict[str, nn.Parameter]:
        """Return zeros in the shapes of the embedding's tensors; expanded, they take no memory."""
        if device not in self._placeholders:
            zero = torch.zeros((), dtype=self.dtype, device=device)
            self._placeholders[device] = {
                t.name: nn.Parameter(zero.expand(t.shape), requires_grad=False)
                for t in self.inventory.blocks[0].tensors
            }
        return self._placeholders[device]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's weights."""
        dtype: torch.dtype = self.model.config.dtype  # type: ignore[assignment]
        return dtype


def _all_tokens(like: torch.Tensor) -> torch.Tensor:
    """Return the mask that hides no token, for models that make masks and biases from it.

    Without one, transformers looks for documents in the positions, and waits for the device to do
    so. Some models would make a mask of floats, whose sums on a GPU torch calls irreproducible.
    """
    return torch.ones_like(like)


def _submodules(layer: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    """Return the modules of a layer at those of the paths that it has."""
    found = dict(layer.named_modules())
    return [found[path] for path in paths if path in found]


def find_holders(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Find the modules that hold each tensor, and under which local names.

    A tied tensor has several holders. It is listed under its first name, as in the inventory.
    """
    first_names: dict[int, str] = {}
    holders: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{path}.{leaf}" if path else leaf
                name = first_names.setdefault(id(parameter), full)
                holders.setdefault(name, []).append((module, leaf))
    return holders
