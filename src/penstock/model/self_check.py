"""Check on a small twin that Penstock computes what a model computes, before memory is allocated.

Penstock replaces a model's attention function, calls its layers one by one, and differentiates each
of them separately. That is right only if a layer is a function of its input: it leaves attention to
the function that its config names, passes nothing but hidden states to other layers, and computes
from tokens of the same document before it. No list of model families decides that. A twin of the
model (`penstock.model.twin`) runs here on the CPU in both ways, and outputs and gradients are
compared; then tokens are changed, to see which outputs depend on them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from penstock.errors import UnsupportedModelError
from penstock.machine.user_cache import cache_directory, load_entry, save_entry
from penstock.model.adapters import Adapter, find_adapter
from penstock.model.attention import register
from penstock.model.document_attention import attend
from penstock.model.experts import has_experts
from penstock.model.inventory import Inventory
from penstock.model.layer_probe import Arguments
from penstock.model.mlp_tiles import tiled_modules
from penstock.model.router_loss import RouterLoss
from penstock.model.split import Calls, MicroBatch, SplitModel
from penstock.model.survey import ENCODER_DECODER, LAYERS_SHARE, survey_model
from penstock.model.twin import (
    VOCABULARY,
    build_twin,
    is_known_code,
    twin_class,
    twin_config_of,
    twin_key,
)
from penstock.model.unneeded_outputs import find_unneeded

LENGTH = 12
"""Number of tokens in a row: more than a twin's sliding window."""

FIRST = 5
"""Number of tokens of the first document of a packed row."""

TOLERANCE = 1e-3
"""Largest difference of two fp32 results, relative to the largest number in them."""

ROUNDING = 1e-5
"""Differences this small, relative to the largest gradient of the model, are rounding."""

LOSS_TOLERANCE = 1e-5
"""Largest relative difference of two losses by rounding."""

IGNORE_INDEX = -100
"""The label of a token that does not count."""

KNOWN_ARGUMENTS = ("position_ids", "position_embeddings", "attention_mask", "cache_position")
"""Arguments of layers that every step computes from positions."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a model's twin has shown."""

    not_trainable: str = ""
    """Why Penstock cannot train the model; empty if it can."""

    own_loss: str = ""
    """Why the model's loss is not next-token cross-entropy; empty if it is."""

    own_attention: bool = False
    """Whether layers compute attention with their own code, one call for each document."""

    mixes_documents: str = ""
    """What carries information from one document of a packed row to the next; empty if nothing."""

    unneeded: tuple[str, ...] = ()
    """Paths, within a layer, of modules whose outputs no gradient depends on."""


def check_model(model: nn.Module, inventory: Inventory) -> Inventory:
    """Return the inventory of a model with the verdict on it. The model may be on the meta device.

    Models that differ only in their sizes share a verdict.
    """
    if inventory.not_trainable.startswith((ENCODER_DECODER, LAYERS_SHARE)):
        return inventory
    verdict = _check(model, inventory.layers[0].name.rpartition(".")[0])
    blocks = tuple(
        replace(block, unneeded=verdict.unneeded) if block.kind == "layer" else block
        for block in inventory.blocks
    )
    return replace(
        inventory,
        blocks=blocks,
        not_trainable=verdict.not_trainable or inventory.not_trainable,
        own_loss=verdict.own_loss,
        mixes_documents=verdict.mixes_documents,
        own_attention=verdict.own_attention,
        plain_attention=inventory.plain_attention and not verdict.own_attention,
    )


def _check(model: nn.Module, layers_path: str) -> Verdict:
    config: Any = model.config
    for name in ("layerdrop", "decoder_layerdrop"):
        if getattr(config, name, None):
            return Verdict(
                f"{name} is {getattr(config, name)}, so the model skips layers at random, which "
                f"Penstock does not; set it to 0 with --model-config {name}=0.0"
            )
    model_class = twin_class(model)
    try:
        twin, adapter = twin_config_of(model, layers_path), find_adapter(model)
        key = twin_key(model_class, twin, layers_path, *([adapter.key] if adapter else []))
    except Exception as problem:  # a config's own checks may raise any exception
        return Verdict(_no_twin(model_class, problem))
    return _check_twin(model_class, _Config(twin, key, adapter), layers_path)


class _Config:
    """A twin's config and adapter; they compare by their fields, so that verdicts can be cached."""

    def __init__(self, config: Any, key: str, adapter: Adapter | None) -> None:
        self.config, self.key, self.adapter = config, key, adapter

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Config) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)


@functools.lru_cache(maxsize=256)
def _check_twin(model_class: type, twin: _Config, path: str) -> Verdict:
    """Return the verdict on a twin, from the user's cache if it was found before."""
    file = cache_directory() / "verdicts" / f"{twin.key}.json"
    known = load_entry(Verdict, file) if is_known_code(model_class) else None
    if known is not None:
        return known
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        verdict = _Check(model_class, twin.config, path, twin.adapter).verdict()
    if is_known_code(model_class):
        save_entry(verdict, file)
    return verdict


def _no_twin(model_class: type, problem: Exception) -> str:
    return (
        f"{model_class.__name__} cannot be checked: transformers could not run a small model with "
        f"this config ({_describe(problem)})"
    )


def _describe(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0]}" if lines else type(problem).__name__


class _Check:
    """Compares one model class with itself: as transformers runs it, and as Penstock does."""

    def __init__(self, model_class: type, config: Any, path: str, adapter: Adapter | None) -> None:
        self.model_class, self.config, self.path = model_class, config, path
        self.adapter = adapter
        generator = torch.Generator().manual_seed(2)
        self.ids, self.others = torch.randint(1, VOCABULARY, (2, 1, LENGTH), generator=generator)
        self.positions = torch.arange(LENGTH)[None]
        self.packed = torch.cat([torch.arange(FIRST), torch.arange(LENGTH - FIRST)])[None]

    def verdict(self) -> Verdict:
        """Try the model with Penstock's attention, and if that is not right, with its own."""
        found = self._verdict_with(own_attention=False)
        if not found.not_trainable:
            return found
        if getattr(self.config, "output_router_logits", False):
            # Nothing notes what the routers of layers with their own attention code do.
            return self._without_router_loss(found)
        own = self._verdict_with(own_attention=True)
        return found if own.not_trainable else own

    def _without_router_loss(self, found: Verdict) -> Verdict:
        """Return why the model is refused: for the auxiliary loss of its routers, or as found."""
        config = copy.deepcopy(self.config)
        config.output_router_logits = False
        without = _Check(self.model_class, config, self.path, self.adapter).verdict()
        if without.not_trainable or "output_router_logits" in found.not_trainable:
            return found
        return Verdict(
            f"output_router_logits is on, and Penstock does not compute the loss that "
            f"{self.model_class.__name__} adds for it, if any; set it to false with --model-config "
            f"output_router_logits=false"
        )

    def _build(self, attention: str | None) -> nn.Module:
        return build_twin(self.model_class, self.config, attention, adapter=self.adapter)

    def _verdict_with(self, *, own_attention: bool) -> Verdict:
        """Run all comparisons, the cheapest first, and stop at the first that fails."""
        try:
            plain = self._build(None if own_attention else "eager")
            expected = _Results.of(plain, self.ids)
            if _draws_in_layers(plain, self.path, self.ids):
                return Verdict(self._random())
            if rewritten := _changed_by_loading(plain):
                return Verdict(self._changes(rewritten))
        except UnsupportedModelError as problem:
            return Verdict(str(problem))
        except Exception as problem:  # the model's own code may raise any exception for these sizes
            return Verdict(_no_twin(self.model_class, problem))
        register(_RECORDING, _attend_recording)
        try:
            attention = None if own_attention else _RECORDING
            model = self._build(attention)
        except Exception:  # its class looks up its own attention code by name
            return Verdict(self._own_attention(plain))
        _calls.clear()
        try:
            blocks = _Blocks(model, self.config, self.path, own_attention=own_attention)
            got = blocks.run(self.ids, self.positions)
        except UnsupportedModelError as problem:
            return Verdict(str(problem))
        except Exception as problem:  # the model's own code may raise any exception
            return Verdict(self._failure(plain, problem))
        callers = set(_calls)
        silent = [layer for layer in blocks.layers if callers.isdisjoint(layer.modules())]
        if difference := got.difference(expected):
            return Verdict(self._reason(silent) + f": {difference}")
        changed = torch.cat([self.ids[:, :FIRST], self.others[:, FIRST:]], dim=1)
        later = blocks.run(changed, self.positions).logits
        if not _close(later[:FIRST], got.logits[:FIRST]):
            return Verdict(
                f"{self.model_class.__name__} is not causal: later tokens change the outputs of "
                f"earlier ones"
            )
        return Verdict(
            own_loss=self._own_loss(plain),
            own_attention=own_attention,
            mixes_documents=self._find_mixer(blocks, silent),
            unneeded=blocks.find_unneeded(self.ids, self.positions),
        )

    def _own_loss(self, plain: nn.Module) -> str:
        """Return why the loss that the model computes is not the one that the engine computes."""
        if _adds_router_loss(self.config):
            return ""  # its gradients have been compared
        labels = self.ids.clone()
        labels[0, FIRST] = IGNORE_INDEX
        try:
            with torch.no_grad():
                output: Any = plain(input_ids=self.ids, labels=labels, use_cache=False)
        except Exception:  # it takes no labels, or others
            return ""
        loss = getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return ""
        expected = nn.functional.cross_entropy(output.logits[0, :-1].float(), labels[0, 1:])
        if abs(float(loss) - float(expected)) <= LOSS_TOLERANCE * float(expected):
            return ""
        return (
            f"{self.model_class.__name__} does not return next-token cross-entropy as its loss: "
            f"that of a small model is {float(loss):.6g}, and its cross-entropy is "
            f"{float(expected):.6g}. Penstock would train with the latter. Set what the loss adds "
            f"to 0 in the config, or use penstock.stream(model, ...), which trains with any loss"
        )

    def _find_mixer(self, blocks: _Blocks, silent: list[nn.Module]) -> str:
        """Return what lets a document of a packed row depend on the one before it."""
        bounds = [[0, FIRST, LENGTH]]
        packed = blocks.run(self.ids, self.packed, bounds).logits[FIRST:]
        changed = torch.cat([self.others[:, :FIRST], self.ids[:, FIRST:]], dim=1)
        if not _close(blocks.run(changed, self.packed, bounds).logits[FIRST:], packed):
            names = sorted({name for layer in silent for name in _mixers(layer)})
            return ", ".join(names) or "an operation other than attention"
        second = self.ids[:, FIRST:]
        alone = blocks.run(second, self.positions[:, : second.shape[1]]).logits
        return "" if _close(packed, alone) else "positions that do not restart with a document"

    def _failure(self, plain: nn.Module, problem: Exception) -> str:
        """Say why a model does not run layer by layer, and what its layers need."""
        layers: Any = plain.get_submodule(self.path)
        extras = _extra_arguments(plain, list(layers), self.ids)
        mixers = sorted({name for layer in layers for name in _mixers(layer)})
        needs = [f"its layers take {', '.join(extras)}"] if extras else []
        needs += [f"its layers mix tokens with {', '.join(mixers)}"] if mixers else []
        return (
            f"{self.model_class.__name__} does not run layer by layer with Penstock's attention: "
            f"{'; '.join([*needs, _describe(problem)])}"
        )

    def _random(self) -> str:
        return (
            f"{self.model_class.__name__} draws random numbers in training in addition to dropout, "
            f"to choose experts; if its config has router_jitter_noise, set it to 0 "
            f"with --model-config router_jitter_noise=0.0"
        )

    def _changes(self, name: str) -> str:
        return (
            f"{self.model_class.__name__} changes {name} whenever transformers loads it, so a "
            f"checkpoint would not load as the model that was trained; if its config has "
            f"rescale_prenorm_residual, set it to false with --model-config "
            f"rescale_prenorm_residual=false"
        )

    def _own_attention(self, plain: nn.Module) -> str:
        layers: Any = plain.get_submodule(self.path)
        names = ", ".join(sorted({name for layer in layers for name in _mixers(layer)}))
        return (
            f"the layers of {self.model_class.__name__} compute attention with their own code "
            f"({names or 'not a function of transformers'}), which Penstock cannot replace"
        )

    def _reason(self, silent: list[nn.Module]) -> str:
        names = ", ".join(sorted({name for layer in silent for name in _mixers(layer)}))
        if names:
            return (
                f"the layers of {self.model_class.__name__} mix tokens with their own code "
                f"({names}), which Penstock cannot replace"
            )
        return f"{self.model_class.__name__} computes something that Penstock does not"


@dataclass(slots=True)
class _Results:
    """Logits `[tokens, vocabulary]`, and gradients of all trained parameters by name."""

    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]

    @staticmethod
    def of(model: nn.Module, ids: torch.Tensor) -> _Results:
        """Run and differentiate the whole model as transformers does."""
        labels = {"labels": ids} if _adds_router_loss(model.config) else {}
        output: Any = model(input_ids=ids, use_cache=False, **labels)
        logits: torch.Tensor = output.logits[0]
        loss = _loss(logits)
        if labels:  # what the model adds to the cross-entropy
            own = nn.functional.cross_entropy(logits[:-1].float(), ids[0, 1:])
            loss = loss + LENGTH * (output.loss - own)
        named = _trained(model)
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return _Results(logits.detach(), _with_zeros(named, grads))

    def difference(self, expected: _Results) -> str:
        """Describe the first difference, or return an empty string."""
        if not _close(self.logits, expected.logits):
            return f"logits differ from transformers' by {_error(self.logits, expected.logits):.2g}"
        # Some gradients are zero but for rounding: the bias of keys changes no attention weight.
        largest = max(float(g.abs().max()) for g in expected.gradients.values())
        for name, gradient in self.gradients.items():
            if not _close(gradient, expected.gradients[name], floor=ROUNDING * largest):
                error = _error(gradient, expected.gradients[name])
                return f"the gradient of {name} differs from transformers' by {error:.2g}"
        return ""


class _Blocks:
    """A twin that runs block by block, as the engine runs a model."""

    def __init__(
        self, model: nn.Module, config: Any, path: str, *, own_attention: bool = False
    ) -> None:
        surveyed = survey_model(model, config, name="twin", blocks=path)
        inventory = replace(surveyed, own_attention=own_attention)
        # A tied head uses tensors of the embedding, whose gradient has a part from each of them.
        self._used = [[*(t.name for t in b.tensors), *b.borrows] for b in inventory.blocks]
        self._tensors = _trained(model)
        self._split = SplitModel(model, inventory, mlp_tile=FIRST)
        self.layers = self._split.layers

    def run(self, ids: torch.Tensor, positions: torch.Tensor, bounds: Any = None) -> _Results:
        """Run forward without gradients, then differentiate each block from its saved input."""
        arguments = self._split.enter(input_ids=ids, position_ids=positions, use_cache=False)[1]
        micro = MicroBatch(ids, positions, ids, bounds, number=0)
        embedded, calls = self._split.embed(micro)
        self._split.start_router_sums(micro)
        sums = micro.router_sums
        if len(arguments) != len(self.layers):
            raise UnsupportedModelError(
                f"the model calls {len(arguments)} of its {len(self.layers)} layers in a step"
            )
        gradients: dict[str, torch.Tensor] = {}
        inputs = [embedded.detach()]
        for index, called in enumerate(arguments):
            with torch.no_grad():
                # A layer with its own attention code gets new arguments in every call.
                with _unchanged(called, type(self.layers[index])):
                    self._split.plain_layer(index, inputs[-1], called)
                out, routing = self._split.routed_layer(index, inputs[-1], calls)
                inputs.append(out)
                if sums is not None:
                    sums.add_all(routing.logits)
        last = inputs.pop().requires_grad_()
        logits = self._split.logits(last[0])
        upstream = self._differentiate(-1, _loss(logits), last, None, gradients)
        assert upstream is not None
        for index in reversed(range(len(arguments))):
            source = inputs[index].requires_grad_()
            out, routing = self._split.routed_layer(index, source, calls)
            others = []
            if sums is not None:
                others = sums.logit_gradients(routing.logits, torch.tensor(float(LENGTH)))
            upstream = self._differentiate(1 + index, out, source, upstream, gradients, others)
        self._differentiate(0, embedded, None, upstream, gradients)
        return _Results(logits.detach(), gradients)

    def find_unneeded(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[str, ...]:
        """Return the paths of modules whose outputs no layer that has them needs in backward.

        The rows are short enough for a single tile: in tiles, backward would repeat the MLP with
        the values that were put in place of an output.
        """
        ids, positions = ids[:, :FIRST], positions[:, :FIRST]
        hidden, calls = self._split.embed(MicroBatch(ids, positions, ids, None, number=0))
        hidden = hidden.detach()
        found: dict[str, bool] = {}
        for index, layer in enumerate(self.layers):
            others = [path for path, _ in tiled_modules(layer)]
            gradients = functools.partial(self._layer_gradients, index, hidden, calls)
            for path, unneeded in find_unneeded(layer, others, gradients).items():
                found[path] = unneeded and found.get(path, True)
            with torch.no_grad():
                hidden = self._split.layer(index, hidden, calls)
        return tuple(sorted(path for path, unneeded in found.items() if unneeded))

    def _layer_gradients(
        self, index: int, hidden: torch.Tensor, calls: Calls
    ) -> list[torch.Tensor]:
        """Return the gradients of a layer's input and parameters, for random ones of its outputs.

        Every call draws the same numbers.
        """
        generator = torch.Generator().manual_seed(index)
        source = hidden.detach().requires_grad_()
        out, routing = self._split.routed_layer(index, source, calls)
        outputs = [each for each in (out, *routing.logits) if each.requires_grad]
        above = [torch.randn(each.shape, generator=generator) for each in outputs]
        sources = [source, *(self._tensors[n] for n in self._used[1 + index] if n in self._tensors)]
        grads = torch.autograd.grad(outputs, sources, above, allow_unused=True)
        return [grad for grad in grads if grad is not None]

    def _differentiate(
        self,
        block: int,
        out: torch.Tensor,
        source: torch.Tensor | None,
        upstream: torch.Tensor | None,
        into: dict[str, torch.Tensor],
        others: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> torch.Tensor | None:
        """Add the gradients of a block's parameters to `into`; return that of its input.

        `others` are more outputs, each with its gradient.
        """
        named = {n: self._tensors[n] for n in self._used[block] if n in self._tensors}
        sources = [*named.values(), *([] if source is None else [source])]
        outputs, above = [out, *(o for o, _ in others)], [upstream, *(g for _, g in others)]
        grads = torch.autograd.grad(outputs, sources, above, allow_unused=True)
        for name, gradient in _with_zeros(named, grads[: len(named)]).items():
            into[name] = into[name] + gradient if name in into else gradient
        return None if source is None else grads[-1]


@contextlib.contextmanager
def _unchanged(called: Arguments, layer: type[nn.Module]) -> Iterator[None]:
    """Raise UnsupportedModelError if a layer needs gradients of its arguments, or changes them."""
    args, kwargs = called
    names = list(inspect.signature(layer.forward).parameters)[2:]  # after self and hidden states
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    for name, value in named.items():
        if any(tensor.requires_grad for tensor in _tensors(value)):
            raise UnsupportedModelError(
                f"{layer.__name__} takes {name}, which depends on trained tensors, in addition to "
                f"the hidden states; Penstock differentiates hidden states only"
            )
    before = {name: _contents(value) for name, value in named.items()}
    yield
    for name, value in named.items():
        if _contents(value) != before[name]:
            raise UnsupportedModelError(
                f"{layer.__name__} passes tensors to other layers in {name}, such as shared keys "
                f"and values; Penstock differentiates each layer separately and would lose their "
                f"gradients"
            )


def _extra_arguments(plain: nn.Module, layers: list[nn.Module], ids: torch.Tensor) -> list[str]:
    """Return the keyword arguments of layers that are tensors of an unknown meaning."""
    found: set[str] = set()

    def record(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        known = ("hidden_states", *KNOWN_ARGUMENTS)
        found.update(n for n, v in kwargs.items() if n not in known and [*_tensors(v)])

    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    with torch.no_grad():
        plain(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return sorted(found)


def _draws_in_layers(plain: nn.Module, path: str, ids: torch.Tensor) -> bool:
    """Return whether layers with experts draw random numbers, although a twin has no dropout.

    Some routers sample experts. Drawn numbers rarely change the choices of a few tokens, so results
    do not show it.
    """
    states: list[torch.Tensor] = []

    def record(*_: Any) -> None:
        states.append(torch.get_rng_state())

    layers: Any = plain.get_submodule(path)
    routed = [layer for layer in layers if has_experts(layer)]
    hooks = [layer.register_forward_pre_hook(record) for layer in routed]
    hooks += [layer.register_forward_hook(record) for layer in routed]
    with torch.no_grad():
        plain(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return any(
        not torch.equal(before, after)
        for before, after in zip(states[::2], states[1::2], strict=True)
    )


def _changed_by_loading(model: Any) -> str:
    """Return the name of a parameter that transformers changes after it has read it; "" if none.

    After it has read a file, transformers initializes the parameters that the file does not have.
    Mamba's code for that also scales a parameter that was read. The model's weights are changed.
    """
    if not is_known_code(type(model)):
        return ""  # other classes may have their own way to load files
    for part in model.modules():
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            # Some classes make this row zero. It is not trained, and zero in their files.
            part.weight.data[part.padding_idx] = 0.0
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for part in model.modules():
        part._is_hf_initialized = False
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            tensor._is_hf_initialized = True
    with torch.no_grad():
        model.initialize_weights()
    named = model.named_parameters()
    return next((name for name, p in named if not torch.equal(p, before[name])), "")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(inner)


def _contents(value: Any) -> Any:
    """Return what a container holds, by identity, to see whether it changes."""
    if isinstance(value, Mapping):
        return [(key, _contents(inner)) for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return [_contents(inner) for inner in value]
    return (id(value), value._version if isinstance(value, torch.Tensor) else 0)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that have a gradient; the class itself freezes a table of sines."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _with_zeros(
    named: dict[str, nn.Parameter], gradients: Sequence[torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    pairs = zip(named.items(), gradients, strict=True)
    return {name: torch.zeros_like(t) if grad is None else grad for (name, t), grad in pairs}


def _loss(logits: torch.Tensor) -> torch.Tensor:
    """Return a loss to which every token contributes differently."""
    targets = torch.arange(1, logits.shape[0] + 1)
    return nn.functional.cross_entropy(logits.float(), targets, reduction="sum")


def _adds_router_loss(config: Any) -> bool:
    return RouterLoss.of(config) is not None


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def _close(got: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> bool:
    if got.shape != expected.shape:
        return False
    difference = float((got - expected).abs().max())
    return difference <= max(TOLERANCE * float(expected.abs().max()), floor)


# Which modules mix tokens.

_RECORDING = "penstock-check"
_calls: list[nn.Module] = []


def _attend_recording(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    _calls.append(module)
    return attend(module, *args, **kwargs)


def _mixers(layer: nn.Module) -> list[str]:
    """Return the classes of a layer's modules that mix tokens, by their names.

    The names only explain a refusal; they do not decide it. GPT-2's `Conv1D` is a linear layer.
    """
    words = ("attention", "attn", "conv", "mixer", "recurrent", "mamba", "delta", "ssm", "rglru")
    names = {type(m).__name__ for m in layer.modules() if m is not layer}
    return [n for n in names if any(w in n.lower() for w in words)
            and not n.lower().endswith(("norm", "mlp")) and n != "Conv1D"]  # fmt: skip
