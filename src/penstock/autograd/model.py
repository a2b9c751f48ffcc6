"""A transformers model whose weights stream, as a class that is put on the caller's own model.

The caller's model stays what it is: the same object, with its config, its head and its own code
around the layers. What changes: the module that owns the layers hands its arguments to the engine
and gets the output of the last layer back, parameters are those of `penstock.autograd.parameters`,
and methods that need values of weights ask the engine.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from penstock.autograd.default_positions import Positions, find_positions
from penstock.autograd.inputs import split_inputs
from penstock.autograd.layers_function import run_layers
from penstock.autograd.module_modes import ModuleModes
from penstock.autograd.parameters import Gradients, HeadParameter, StreamedParameter
from penstock.autograd.peft_wrapper import PeftWrapper
from penstock.autograd.towers import Towers
from penstock.engine.engine import Engine
from penstock.engine.restore import check_host_memory
from penstock.errors import EngineError, UnsupportedModelError
from penstock.model.attention import DOCUMENTS, using_attention
from penstock.model.document_attention import register_document_attention
from penstock.model.inventory import TensorSpec
from penstock.model.layer_probe import LayerProbes
from penstock.model.meta_model import on_meta
from penstock.model.split import find_holders
from penstock.optim import formats
from penstock.plan.plan import Plan
from penstock.roles import Role

HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
)

CLOSED = (
    "is closed: its engine has released the weights. Load what model.save_pretrained(folder) has "
    "saved, or stream the model again"
)


class StreamedModel:
    """The methods of a streamed model that differ from those of its own class."""

    _stream: _Stream

    @property
    def engine(self) -> Engine:
        """The engine that streams the weights."""
        return self._stream.engine

    @property
    def plan(self) -> Plan:
        """Where everything is stored, and how much memory it needs."""
        return self.engine.plan

    def close(self) -> None:
        """Release the engine's memory. A model that was passed gets its trained weights back."""
        self._stream.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Saving and loading.

    def save_checkpoint(self, folder: str | Path, **kwargs: Any) -> None:
        """Save the model and the optimizer states, in bounded memory; see `Engine.write`."""
        self.engine.write(folder, **kwargs)

    def load_checkpoint(self, folder: str | Path) -> None:
        """Continue, bit for bit, from what `save_checkpoint` saved, also under other budgets."""
        self._stream.gradients.clear()
        self.engine.read(folder)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], state_dict: Any = None, **kwargs: Any
    ) -> None:
        """Save the weights, the config and the tokenizer for `from_pretrained`.

        An earlier model in the folder is replaced. Weights are written one after another, so that
        no copy of them needs host memory.
        """
        if state_dict is not None:
            raise EngineError(
                "save_pretrained of a streamed model saves the weights of its engine; leave out "
                "state_dict"
            )
        if kwargs.get("push_to_hub"):
            raise EngineError("save the model first, then upload the folder to the Hub")
        _replace_model(Path(save_directory), functools.partial(self.engine.write, optimizer=False))

    def state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return a copy of all weights in host memory; EngineError if that is too small.

        As in torch, they are added to `destination` if a module around the model passes one.
        `keep_vars` is ignored: the weights of the engine cannot be returned without a copy.
        """
        found = OrderedDict() if destination is None else destination
        found.update({prefix + name: t for name, t in self._stream.copy_weights().items()})
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], strict: bool = True, assign: bool = False
    ) -> Any:
        """Replace all weights; the optimizer states stay as they are, as in torch.

        Weights of the model's type that do not change keep their master weights in fp32, so that
        loading `state_dict()` changes nothing.
        """
        return self._stream.load_weights(state_dict, strict=strict)

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        raise EngineError(
            "save the model with model.save_pretrained(folder), then upload the folder to the Hub"
        )

    # Training.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that were computed."""
        self._stream.gradients.clear()

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """Do nothing: a streamed model recomputes every layer in its backward pass anyway."""

    def gradient_checkpointing_disable(self) -> None:
        """Do nothing: a streamed model recomputes every layer in its backward pass anyway."""

    def enable_input_require_grads(self) -> None:
        """Do nothing: a streamed model is differentiable as it is."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does, with one forward pass over the whole sequence per token.

        There is no KV cache. `penstock.generate` has one, and is faster.
        """
        config = kwargs.get("generation_config")
        if config is None or "use_cache" in kwargs:
            kwargs["use_cache"] = False
        own: Any = getattr(self, "generation_config", None)
        changed = [each for each in (config, own) if each is not None]
        before = [each.use_cache for each in changed]
        for each in changed:
            each.use_cache = False
        try:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        finally:
            for each, value in zip(changed, before, strict=True):
                each.use_cache = value

    # Where it is, and what cannot be changed.

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model if it is there already; EngineError otherwise."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        here = self.engine.device.torch_device
        same_device = device is None or (
            device.type == here.type and device.index in (None, here.index or 0)
        )
        if not same_device or dtype not in (None, self._stream.dtype):
            self._apply()
        return self

    def cuda(self, device: Any = None) -> Any:
        return self.to(torch.device("cuda", device) if device is not None else "cuda")

    def cpu(self) -> Any:
        return self.to("cpu")

    def float(self) -> Any:
        return self.to(torch.float32)

    def bfloat16(self) -> Any:
        return self.to(torch.bfloat16)

    def half(self) -> Any:
        return self.to(torch.float16)

    def double(self) -> Any:
        return self.to(torch.float64)

    def _apply(self, *_: Any, **__: Any) -> NoReturn:
        raise EngineError(
            f"a streamed model computes on {self.engine.device.torch_device} in "
            f"{self._stream.dtype}, and cannot be moved or converted. Choose with "
            f"penstock.stream(..., device=, dtype=)"
        )

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *_: Any, **__: Any) -> Any:
        inner: Any = self
        table = inner.get_input_embeddings()
        if new_num_tokens not in (None, table.weight.shape[0]):
            raise EngineError(
                f"the embedding of a streamed model cannot be resized from {table.weight.shape[0]} "
                f"to {new_num_tokens} rows; resize the model before penstock.stream"
            )
        return table

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise EngineError(
            "a streamed model cannot be copied: its weights are in the tiers of its engine. Save "
            "it with model.save_pretrained(folder), and load the copy from there"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise EngineError(
            "a streamed model cannot be pickled; save it with model.save_pretrained(folder)"
        )


@functools.lru_cache(maxsize=64)
def streamed_class(original: type) -> type:
    """Return the class of streamed models of a class. It has the same name, which files record."""
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (StreamedModel, original), names)


class _Stream:
    """Connects a caller's model with an engine. `towers` are those of a multimodal model."""

    def __init__(self, model: nn.Module, engine: Engine, towers: Towers | None) -> None:
        self.model, self.engine, self._towers = model, engine, towers
        self.gradients = Gradients(engine)
        self.dtype = engine.split_model.dtype
        self._path = engine.inventory.layers[0].name.rpartition(".")[0]
        self._holders = find_holders(model)
        self._check_hooks()
        self._modes = self._find_modes()
        self._modules = self._streamed_names()
        self.parameters = self._make_parameters()
        """The model's parameters by name, tied ones once."""
        self._probes = LayerProbes(model, self._path)
        self._configs = [c for m in model.modules() if (c := getattr(m, "config", None))]
        self._embedding_only = self._make_placeholders()
        register_document_attention()
        self._positions_of: Positions | None = None
        self._former_buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._connect()
        self._closed = False
        self.wrapper: PeftWrapper | None = None
        """The PEFT model around the model, if there is one."""

    # Connecting.

    def _check_hooks(self) -> None:
        """Raise UnsupportedModelError if a module that will not run has hooks.

        The copy has that of transformers for gradients of the embedding's output, and needs none.
        """
        for name, module in self._streamed_modules():
            every = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
            hooks = [hook for each in every for hook in each.values()]
            if any(not str(hook.__module__).startswith("transformers.") for hook in hooks):
                raise UnsupportedModelError(
                    f"{name} has hooks, which would not run: the engine computes with a copy of "
                    f"it. Remove them before penstock.stream"
                )

    def _streamed_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that the engine runs in place of the caller's: embedding and layers."""
        table = self.model.get_input_embeddings()  # type: ignore[operator]
        for name, module in self.model.named_modules():
            if name.startswith(f"{self._path}.") or module is table:
                yield name, module

    def _streamed_names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self._streamed_modules())

    def _check_structure(self) -> None:
        """Raise EngineError if modules were added or replaced, which the engine does not run."""
        changed = sorted(self._streamed_names() ^ self._modules)
        if changed:
            raise EngineError(
                f"{changed[0]} was added to or removed from the streamed model, whose layers the "
                f"engine computes with a copy. Change the model before penstock.stream: call "
                f"get_peft_model first and pass no peft_config to a trainer"
            )

    def _find_modes(self) -> ModuleModes:
        """Pair the model's modules with those of the copy with which the engine computes."""
        split, copies = self.engine.split_model, dict(self.engine.split_model.model.named_modules())
        for index, layer in enumerate(split.layers):
            copies |= dict(layer.named_modules(prefix=f"{self._path}.{index}"))
        names = self._streamed_names()
        return ModuleModes(self.model.named_modules(), copies.items(), names)

    def _make_parameters(self) -> dict[str, nn.Parameter]:
        held = self.engine.head_parameters()
        device, made = self.engine.device.torch_device, {}
        for block in self.engine.inventory.blocks:
            for tensor in block.tensors:
                made[tensor.name] = (
                    HeadParameter.of(tensor.name, self.gradients, held[tensor.name])
                    if tensor.name in held
                    else StreamedParameter(
                        tensor.name, self.gradients, shape=tensor.shape, dtype=self.dtype,
                        device=device, requires_grad=tensor.trainable,
                    )
                )  # fmt: skip
        return made  # type: ignore[return-value]

    def _make_placeholders(self) -> dict[str, nn.Parameter]:
        """Return zeros without memory for tensors that only the embedding uses.

        Some models compute with them even if they get the embeddings of tokens.
        """
        zero = torch.zeros((), dtype=self.dtype, device=self.engine.device.torch_device)
        return {
            t.name: nn.Parameter(zero.expand(t.shape).data, requires_grad=False)
            for t in self.engine.inventory.blocks[0].tensors
            if not isinstance(self.parameters[t.name], HeadParameter)
        }

    def _connect(self) -> None:
        for name, parameter in self.parameters.items():
            self._bind(name, parameter)
        base: Any = self._probes.base
        self._base_forward: Callable[..., Any] = base.forward
        self._signature = inspect.signature(self._base_forward)

        @functools.wraps(self._base_forward)  # its signature, which `generate` looks at
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.forward(*args, **kwargs)

        # torch.compile must not trace the engine: the model's own code around the layers is enough.
        vars(base)["forward"] = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
        self._move_buffers(base)
        for name, module in self._streamed_modules():
            refuse = functools.partial(_refuse_hook, name)
            vars(module).update(dict.fromkeys(HOOKS, refuse))
        self._class = type(self.model)
        own_class: Any = self._class
        self.model.__class__ = streamed_class(own_class)
        vars(self.model)["_stream"] = self
        if self._towers is not None:
            self._towers.connect(self.engine.device.torch_device, self.dtype)

    def _move_buffers(self, base: nn.Module) -> None:
        """Move the buffers outside of the layers to the device, such as those of positions.

        The model's own code after the layers runs with them, and some models' code expects that
        they are where the hidden states are.
        """
        device = self.engine.device.torch_device
        streamed = {id(module) for _, module in self._streamed_modules()}
        for module in base.modules():
            for leaf, tensor in module._buffers.items():
                if tensor is None or tensor.is_meta or id(module) in streamed:
                    continue
                if tensor.device != device:
                    self._former_buffers.append((module, leaf, tensor))
        for module, leaf, tensor in self._former_buffers:
            module._buffers[leaf] = tensor.to(device)

    def _bind(self, name: str, parameter: nn.Parameter) -> None:
        for module, leaf in self._holders[name]:
            module._parameters[leaf] = parameter

    def close(self) -> None:
        """Make the caller's model what it was, and close the engine, which gives it its weights."""
        if self._closed:
            return
        self._closed = True
        for name, parameter in self.parameters.items():
            shape = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            self._bind(name, on_meta(nn.Parameter(shape, requires_grad=parameter.requires_grad)))
        for _, module in self._streamed_modules():
            for hook in HOOKS:
                vars(module).pop(hook, None)
        vars(self._probes.base).pop("forward", None)
        for module, leaf, tensor in self._former_buffers:
            module._buffers[leaf] = tensor
        self.model.__class__ = self._class
        del vars(self.model)["_stream"]
        if self._towers is not None:
            self._towers.disconnect()
        if self.wrapper is not None:
            self.wrapper.remove()
        if self.engine.live_model is None:
            vars(self.model)["forward"] = functools.partial(_refuse_closed, self._class.__name__)
        self.engine.close()

    # Forward.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module that owns the layers computes."""
        bound = self._signature.bind(*args, **kwargs).arguments
        given = {k: v for k, v in bound.items() if k != "kwargs"} | bound.get("kwargs", {})
        self._check_structure()
        engine, features, axes = self.engine, None, 1
        if self._towers is not None:
            given, features = self._towers.find_inputs(given)
            axes = self._towers.position_axes
        device = engine.device.torch_device
        modes = self._modes.current(training=self.model.training)
        positions_of = self._find_positions if self._towers is None else None
        micros = split_inputs(
            given, engine.workload, engine.inventory, device, features, axes, positions_of
        )
        hidden = run_layers(engine, micros, modes, training=self.model.training)
        return self._after_layers(hidden)

    def _find_positions(self) -> Positions:
        """Return how the model itself makes positions for rows with padding on the left."""
        if self._positions_of is None:
            base, probes = self._probes.base, self._probes
            streaming = vars(base).pop("forward")  # the probes call the model's own
            try:
                with self._without_embedding(), probes.head_installed():
                    self._positions_of = find_positions(
                        probes.enter, self.engine.inventory.model, self.engine.device.torch_device
                    )
            finally:
                vars(base)["forward"] = streaming
                probes.clear()
        return self._positions_of

    def _after_layers(self, hidden: torch.Tensor) -> Any:
        """Let the model's own code compute what follows its last layer, such as a norm."""
        rows, length, width = hidden.shape
        probes, tokens = self._probes, rows * length
        probes.return_tuples = self.engine.split_model.layers_return_tuples
        count = 1 if self.engine.inventory.own_attention else tokens
        inputs = {
            "inputs_embeds": hidden.new_zeros(1, count, self.engine.split_model.embedding_width),
            "position_ids": torch.zeros(1, count, dtype=torch.int64, device=hidden.device),
            "use_cache": False,
        }
        if self.engine.inventory.own_attention:
            inputs["attention_mask"] = torch.ones(1, 1, dtype=torch.int64, device=hidden.device)
        flat = hidden.view(1, tokens, width)
        with self._without_embedding(), probes.head_installed():
            out = probes.run_head(flat, lambda: self._base_forward(**inputs))
        return _reshaped(out, rows, length)

    @contextlib.contextmanager
    def _without_embedding(self) -> Iterator[None]:
        """Bind zeros in place of the embedding's parameters, and use attention without masks."""
        for name, placeholder in self._embedding_only.items():
            self._bind(name, placeholder)
        own = self.engine.inventory.own_attention
        try:
            with contextlib.nullcontext() if own else using_attention(self._configs, DOCUMENTS):
                yield
        finally:
            for name in self._embedding_only:
                self._bind(name, self.parameters[name])

    # Weights.

    @property
    def _outside(self) -> Mapping[str, torch.Tensor]:
        """Tensors of a multimodal model that do not stream."""
        return {} if self._towers is None else self._towers.tensors

    @property
    def _originals(self) -> Mapping[str, torch.Tensor]:
        """Tensors of which PEFT trains a copy. Nothing computes with them, so the engine has none.

        The live model keeps them until `close`.
        """
        live = self.engine.live_model
        kept = {} if live is None else live.weights
        return {name: tensor for name, tensor in kept.items() if name not in self.parameters}

    def copy_weights(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the state dict in host memory; tied ones share theirs."""
        itemsize = self.dtype.itemsize
        nbytes = itemsize * self.engine.inventory.parameters()
        check_host_memory(self._class.__name__, nbytes)
        found: dict[str, torch.Tensor] = OrderedDict()
        state = self.engine.state
        first = {id(p): n for n, p in self.parameters.items()}
        outside, originals = self._outside, self._originals
        found |= {name: tensor.detach().cpu() for name, tensor in outside.items()}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name in outside:
                continue
            if name in originals:
                found[name] = originals[name].detach().cpu()
            if id(parameter) not in first:
                continue
            known = first[id(parameter)]
            if known not in found:
                found[known] = state.weight(known, self.dtype)
            found[name] = found[known]
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        found |= {t.name: buffers[t.name].cpu() for t in self.engine.inventory.buffers}
        return found

    def load_weights(self, state: Mapping[str, torch.Tensor], *, strict: bool) -> Any:
        """Replace all weights; tied tensors may be under any of their names."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name not in self._outside:
                names.setdefault(id(parameter), []).append(name)
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            alias = next((n for n in names[id(parameter)] if n in state), None)
            if alias is None:
                raise EngineError(
                    f"the state dict has no {name}, and a streamed model replaces all its weights "
                    f"together"
                )
            if state[alias].shape != parameter.shape:
                raise EngineError(
                    f"{alias} has the shape {tuple(state[alias].shape)} in the state dict and "
                    f"{tuple(parameter.shape)} in the model"
                )
            found[name] = state[alias].detach()
        known = {n for each in names.values() for n in each}
        known |= {t.name for t in self.engine.inventory.buffers} | self._outside.keys()
        unexpected = [name for name in state if name not in known]
        if strict and unexpected:
            raise EngineError(f"the state dict has {unexpected[0]}, which the model does not have")
        self.gradients.clear()
        self.engine.replace_weights(lambda engine: _write_weights(engine, found))
        with torch.no_grad():
            for name, tensor in (*self._outside.items(), *self._originals.items()):
                if name in state:
                    tensor.copy_(state[name])
        keys: Any = nn.modules.module._IncompatibleKeys
        return keys([], unexpected)


def connect(model: nn.Module, engine: Engine, towers: Towers | None = None) -> _Stream:
    """Make a caller's model, whose parameters have no memory, a streamed model."""
    return _Stream(model, engine, towers)


def _write_weights(engine: Engine, given: Mapping[str, torch.Tensor]) -> None:
    """Write weights and master weights into the tiers, block by block; moments stay."""
    for index, block in enumerate(engine.inventory.blocks):
        masters = {t.name: _master_weight(engine, t, given[t.name]) for t in block.tensors}
        _write_block(engine, index, masters)


def _write_block(engine: Engine, index: int, masters: Mapping[str, torch.Tensor]) -> None:
    access = engine.access

    def parts(tensor: TensorSpec, low: int, high: int) -> tuple[torch.Tensor, Any]:
        values = masters[tensor.name].reshape(-1)[low:high].float()
        return formats.store_master(values, access.weight_dtype)

    access.fill(index, Role.WEIGHT, lambda tensor, low, high: parts(tensor, low, high)[0])
    if access.formats.has(Role.MASTER) and engine.inventory.blocks[index].parameters(True):
        access.fill(index, Role.MASTER, lambda tensor, low, high: parts(tensor, low, high)[1])


def _master_weight(engine: Engine, tensor: TensorSpec, given: torch.Tensor) -> torch.Tensor:
    """Return the master weight of a tensor that is to have the given values."""
    given = given.to("cpu")
    if not tensor.trainable or given.dtype == torch.float32:
        return given
    known = engine.state.weight(tensor.name, given.dtype)
    # A weight in 16 bits that is already there has more bits in its master weight.
    return torch.where(given == known, engine.state.weight(tensor.name, torch.float32), given)


def _reshaped(out: Any, rows: int, length: int) -> Any:
    """Give the last hidden state of a model's output its rows back."""
    if isinstance(out, tuple):
        return (out[0].reshape(rows, length, -1), *out[1:])
    out.last_hidden_state = out.last_hidden_state.reshape(rows, length, -1)
    return out


def _refuse_hook(name: str, *_: Any, **__: Any) -> NoReturn:
    raise EngineError(
        f"a hook on {name} would not run: the engine computes the embedding and the layers of a "
        f"streamed model with a copy. Hooks on the whole model and on its head do run"
    )


def _refuse_closed(name: str, *_: Any, **__: Any) -> NoReturn:
    raise EngineError(f"this {name} {CLOSED}")


def _replace_model(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a model next to its place, and then move its files there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as temporary:
        draft = Path(temporary) / "model"
        write(draft)
        names = {path.name for path in draft.iterdir()}
        for path in (*folder.glob("model*.safetensors"), *folder.glob("model*.index.json")):
            if path.name not in names:
                path.unlink()  # a shard of an earlier model with more shards
        for path in draft.iterdir():
            target = folder / path.name
            if target.is_dir():
                shutil.rmtree(target)
            path.replace(target)
