"""Survey a model: find its blocks and tensors from the config alone, without weights or a GPU.

The model is built on PyTorch's meta device, where tensors have shapes but no data. transformers
chooses the model class and ties its tensors; this module finds the blocks in it.
"""

from __future__ import annotations

import fnmatch
import inspect
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import SurveyError
from penstock.model.adapters import ORIGINAL, Adapter, find_adapter
from penstock.model.config import load_config
from penstock.model.config_check import describe, describe_short_lists
from penstock.model.inventory import Block, Inventory, TensorSpec
from penstock.model.output_weight import output_weight

if TYPE_CHECKING:
    from torch import nn

    from penstock.model.parameter_flow import ParameterFlow

LAYER_LISTS = (
    "model.layers",
    "transformer.h",
    "gpt_neox.layers",
    "model.decoder.layers",
    "model.language_model.layers",
    "transformer.blocks",
    "backbone.layers",
)
"""Paths of the list of layers in different model families, tried in order."""

Check = Callable[["nn.Module", Inventory], Inventory]
"""A function that adds to the inventory of a model why the model cannot be trained."""

ENCODER_DECODER = (
    "it is the decoder of an encoder-decoder model, whose layers attend to an encoder; Penstock "
    "trains decoder-only models"
)
LAYERS_SHARE = "its layers share parameters"


def survey(
    model: str | Path,
    *,
    blocks: str | None = None,
    freeze: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> Inventory:
    """Return the inventory of a causal language model.

    Args:
        model: A directory with `config.json`, or a Hugging Face model id.
        blocks: Path of the list of layers, such as `model.layers`, if it is not found by itself.
        freeze: Patterns of tensors that are not trained, such as `model.embed_tokens.*`.
        trust_remote_code: Whether to run code from the model's repository.
    """
    config = load_config(model, trust_remote_code=trust_remote_code)
    return survey_config(
        config, name=str(model), blocks=blocks, freeze=freeze, trust_remote_code=trust_remote_code
    )


def survey_config(
    config: Any,
    *,
    name: str,
    blocks: str | None = None,
    freeze: Sequence[str] = (),
    trust_remote_code: bool = False,
    adapter: Adapter | None = None,
    check: Check | None = None,
) -> Inventory:
    """Return the inventory of a model with the given config; see `survey_model` for `check`.

    An `adapter` is put into the model first.
    """
    body = _build_on_meta(config, trust_remote_code)
    if adapter is not None:
        adapter.attach(body)
    return survey_model(body, config, name=name, blocks=blocks, freeze=freeze, check=check)


def survey_model(
    body: nn.Module,
    config: Any,
    *,
    name: str,
    blocks: str | None = None,
    freeze: Sequence[str] = (),
    check: Check | None = None,
) -> Inventory:
    """Return the inventory of an existing model, on any device.

    `check` adds what keeps Penstock from training the model; see `penstock.model.self_check`.
    """
    path, layers = _find_layers(body, blocks)
    flow, problem = _trace_parameters(body, path, config)
    tensors = _TensorsByBlock(body, path, len(layers), freeze, flow, problem)
    embedding, head = tensors.embedding(), tensors.head()
    layer_blocks = [tensors.layer(i, config) for i in range(len(layers))]
    found = (embedding, *layer_blocks, head)
    trained = [t.name for block in found for t in block.tensors if t.trainable]
    if flow is not None:
        problem = _find_cross_attention(layers, path, trained, flow) or flow.refusal(trained)
    problem = problem or _find_batch_statistics(body)
    inventory = Inventory(
        model=name,
        architecture=type(body).__name__,
        hidden=int(config.hidden_size),
        vocabulary=int(config.vocab_size),
        max_context=max_context(config),
        blocks=found,
        linear_embedding=flow is not None and flow.linear,
        caps_logits=bool(getattr(config, "final_logit_softcapping", None)),
        plain_attention=_plain_attention(config),
        not_trainable=tensors.shared_by_layers() or problem,
        buffers=_persistent_buffers(body),
    )
    return inventory if check is None else check(body, inventory)


def _find_cross_attention(
    layers: nn.ModuleList, path: str, trained: Sequence[str], flow: ParameterFlow
) -> str:
    """Say that layers have parameters for the states of an encoder, which a causal model lacks."""
    takes_states = "encoder_hidden_states" in inspect.signature(layers[0].forward).parameters
    unused = (name for name in trained if name in flow.without_gradient)
    if takes_states and any(name.startswith(f"{path}.") for name in unused):
        return ENCODER_DECODER
    return ""


def _find_batch_statistics(body: nn.Module) -> str:
    """Say which module computes with the whole batch, which Penstock splits; empty if none does."""
    from torch import nn

    for name, module in body.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"{name} is a BatchNorm, which mixes the sequences of a batch"
        if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
            return (
                f"{name} has scale_grad_by_freq, with which the gradient of a token depends on how "
                f"often the whole batch has it; Penstock computes micro-batches separately"
            )
    return ""


def _persistent_buffers(body: nn.Module) -> tuple[TensorSpec, ...]:
    parameters = {name for name, _ in body.named_parameters(remove_duplicate=False)}
    return tuple(
        TensorSpec(name=name, shape=tuple(tensor.shape), trainable=False)
        for name, tensor in body.state_dict().items()
        if name not in parameters and tensor.numel()
    )


def _trace_parameters(body: nn.Module, path: str, config: Any) -> tuple[ParameterFlow | None, str]:
    """Return what runs around the layers, or None and why it is not known."""
    from penstock.model.parameter_flow import StateChangedError, trace_parameters

    try:
        return trace_parameters(body, path, int(config.hidden_size)), ""
    except StateChangedError as problem:
        return None, str(problem)
    except Exception as problem:  # the model's own code may raise any exception
        return None, (
            f"its embedding and its head cannot be run without its layers: "
            f"{type(problem).__name__}: {problem}"
        )


def _build_on_meta(config: Any, trust_remote_code: bool) -> nn.Module:
    import torch
    import transformers

    from penstock.model.meta_model import without_parameters

    try:
        with torch.device("meta"), without_parameters():
            factory: Any = transformers.AutoModelForCausalLM
            body: nn.Module = factory.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as problem:  # the model's own code may raise any exception
        kind = getattr(config, "model_type", "?")
        # These have messages for people. Those of others make no sense without their name.
        plain = isinstance(problem, ValueError | ImportError | AttributeError | TypeError)
        what = describe(problem) if plain else f"{type(problem).__name__}: {describe(problem)}"
        if isinstance(problem, IndexError) and (short := describe_short_lists(config)):
            what = short
        source = getattr(config, "_name_or_path", "")
        where = f"{source}/config.json: " if Path(source).is_dir() else ""
        raise SurveyError(
            f"{where}transformers cannot build a causal language model of type {kind!r}: {what}"
        ) from None
    return body


def _find_layers(body: nn.Module, blocks: str | None) -> tuple[str, nn.ModuleList]:
    """Return the list of layers and its path in the model."""
    from torch import nn

    tried = (blocks,) if blocks else LAYER_LISTS
    for path in tried:
        try:
            module = body.get_submodule(path)
        except AttributeError:
            continue
        if isinstance(module, nn.ModuleList) and len(module) > 0:
            return path, module
    lists = [p for p, m in body.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    raise SurveyError(
        f"found no layers in {type(body).__name__}: looked for a list of modules at "
        f"{', '.join(tried)}; it has lists at {', '.join(lists[:8]) or 'no path'}. "
        f"Name the right one with --blocks, for example `--blocks model.layers`"
    )


class _TensorsByBlock:
    """Assigns each of a model's tensors to one block."""

    def __init__(
        self,
        body: nn.Module,
        path: str,
        count: int,
        freeze: Sequence[str],
        flow: ParameterFlow | None,
        problem: str,
    ) -> None:
        self.body, self.path, self.freeze, self.flow = body, path, freeze, flow
        self._problem = problem  # why there is no flow
        self.first_name: dict[int, str] = {}  # a shared tensor is known by its first name
        self._shared: list[tuple[str, str]] = []
        in_layers: dict[int, dict[str, Any]] = {i: {} for i in range(count)}
        self.outside: dict[str, Any] = {}
        for name, tensor in body.named_parameters(remove_duplicate=False):
            if id(tensor) in self.first_name:
                self._shared.append((self.first_name[id(tensor)], name))
                continue
            self.first_name[id(tensor)] = name
            if flow is not None and ORIGINAL in name and name in flow.without_gradient:
                continue  # PEFT trains a copy of it, and the model computes with that
            if name.startswith(f"{path}."):
                in_layers[int(name[len(path) + 1 :].split(".")[0])][name] = tensor
            else:
                self.outside[name] = tensor
        self.in_layers = in_layers
        self._linear = _linear_weights(body)

    def shared_by_layers(self) -> str:
        """Say which tensor a layer shares with another, or with what is around the layers."""
        start = f"{self.path}."
        for first, other in self._shared:
            if not any(name.startswith(start) for name in (first, other)):
                continue
            if _part_of(first, start) != _part_of(other, start):
                return (
                    f"{LAYERS_SHARE}: {first} is also {other}. Penstock loads and "
                    f"trains the parameters of each layer separately"
                )
        return ""

    def embedding(self) -> Block:
        """Return the embedding, with everything outside the layers but the head's tensors."""
        names = [name for name in self.outside if name not in self._head_names()]
        return Block(
            name=self._input_embedding_name(), kind="embedding", tensors=self._specs(names)
        )

    def layer(self, index: int, config: Any) -> Block:
        """Return one layer."""
        tensors = self.in_layers[index]
        heads, size = _attention_heads(config)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        return Block(
            name=f"{self.path}.{index}",
            kind="layer",
            tensors=self._specs(tensors),
            matmul_elements=sum(_active_elements(name, t, config) for name, t in tensors.items()),
            query_width=heads * size,
            heads=heads if self._calls_attention_once(index, size) else 0,
            key_value_width=2 * kv_heads * size,
            mlp_width=_mlp_width(config),
            active_experts=_active_experts(config) if any(map(_is_expert, tensors)) else 0,
            window=_window(config, index),
        )

    def _calls_attention_once(self, index: int, size: int) -> bool:
        """Return whether a layer has one attention module, with heads of the config's size.

        Every module of transformers that looks up its attention function says whether it is causal.
        Convolutions and linear attention do not.
        """
        layer = self.body.get_submodule(f"{self.path}.{index}")
        found = [module for module in layer.modules() if hasattr(module, "is_causal")]
        return len(found) == 1 and getattr(found[0], "head_dim", size) == size

    def head(self) -> Block:
        """Return the head, which borrows the embedding's table if the two are tied."""
        names = [name for name in self.outside if name in self._head_names()]
        weight = output_weight(self.body)
        if weight is None or id(weight) not in self.first_name:  # or computed from parameters
            return self._other_head(names)
        owner = self.first_name[id(weight)]
        return Block(
            name="lm_head" if owner not in names else owner.removesuffix(".weight"),
            kind="head",
            tensors=self._specs(names),
            borrows=self._borrowed(owner, names),
            matmul_elements=weight.numel(),
        )

    def _other_head(self, names: list[str]) -> Block:
        """Return a head that computes no logits of tokens, such as that of a reward model."""
        if self.flow is None:
            name = type(self.body).__name__
            raise SurveyError(f"{name} has no output embedding for logits; {self._problem}")
        matrices = [name for name in names if self.outside[name].dim() > 1]
        return Block(
            name=matrices[-1].removesuffix(".weight") if matrices else "head",
            kind="head",
            tensors=self._specs(names),
            borrows=self._borrowed("", names),
            matmul_elements=sum(self.outside[name].numel() for name in matrices),
        )

    def _borrowed(self, table: str, own: list[str]) -> tuple[str, ...]:
        """Return the tensors that the head shares with the embedding, such as a tied table."""
        if self.flow is None:
            return () if table in own else (table,)
        return tuple(n for n in self.outside if n in self.flow.head and n not in own)

    def _head_names(self) -> set[str]:
        """Return the names of tensors that are used after the last layer, and only there."""
        if self.flow is not None:
            return set(self.flow.head - self.flow.embedding)
        # Such a model can be planned for, but not trained. Go by names.
        table = self.body.get_output_embeddings()  # type: ignore[operator]
        own = {id(p) for p in table.parameters()} if table is not None else set()
        source = self.body.get_input_embeddings()  # type: ignore[operator]
        own -= {id(p) for p in source.parameters()}
        last = ("norm", "ln_f", "final_layer_norm")
        return {
            name
            for name, tensor in self.outside.items()
            if id(tensor) in own or any(word in name.split(".")[-2] for word in last)
        }

    def _input_embedding_name(self) -> str:
        source = self.body.get_input_embeddings()  # type: ignore[operator]
        return next(str(name) for name, module in self.body.named_modules() if module is source)

    def _specs(self, names: Any) -> tuple[TensorSpec, ...]:
        every = {**self.outside, **{n: t for ts in self.in_layers.values() for n, t in ts.items()}}
        return tuple(
            TensorSpec(
                name=name,
                shape=tuple(every[name].shape),
                trainable=every[name].requires_grad
                and not any(fnmatch.fnmatch(name, pattern) for pattern in self.freeze),
                linear=name in self._linear,
            )
            for name in names
        )


def _part_of(name: str, layers: str) -> str:
    """Return the number of the layer that a tensor is in, or "" if it is in none."""
    return name.removeprefix(layers).split(".")[0] if name.startswith(layers) else ""


def _linear_weights(body: nn.Module) -> set[str]:
    """Return the names of the weights of linear modules, without those of an adapter.

    The fused matrices of experts count: in the files of most models, each expert has linear ones.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D  # GPT-2's: a linear module, transposed

    from penstock.model.experts import PROJECTIONS, has_fused_experts

    adapter = find_adapter(body)
    names = (
        f"{path}.weight"
        for path, module in body.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    )
    fused = (
        f"{path}.{leaf}"
        for path, module in body.named_modules()
        if has_fused_experts(module)
        for leaf in PROJECTIONS
        if leaf in module._parameters
    )
    found = itertools.chain(names, fused)
    return {name for name in found if adapter is None or not adapter.is_own(name)}


# Fields that model families name differently.


def _attention_heads(config: Any) -> tuple[int, int]:
    """Return the number of attention heads and their size; 0 heads for a model without attention.

    A config whose layers differ in the head size has no such field.
    """
    heads = int(getattr(config, "num_attention_heads", None) or 0)
    try:
        size = getattr(config, "head_dim", None)
    except Exception:  # transformers raises an error of its own
        size = None
    return heads, int(size or int(config.hidden_size) // max(heads, 1))


def max_context(config: Any) -> int | None:
    """Return the largest number of positions, or None if the config has no limit."""
    names = ("max_position_embeddings", "max_seq_len")  # MPT: the length of its position bias
    return next((limit for n in names if (limit := getattr(config, n, None)) is not None), None)


def _experts(config: Any) -> int:
    """Return the number of experts per layer; 0 for a dense model."""
    for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        count = getattr(config, name, None)
        if isinstance(count, int) and count:
            return count
    inner = getattr(config, "ffn_config", None)  # DBRX keeps the fields of its MLP here
    return int(getattr(inner, "moe_num_experts", None) or 0)


def _active_experts(config: Any) -> int:
    """Return the number of experts that compute each token."""
    for name in ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"):
        active = getattr(config, name, None)
        if isinstance(active, int) and active:
            return active
    return int(getattr(getattr(config, "ffn_config", None), "moe_top_k", None) or 1)


def _is_expert(name: str) -> bool:
    """Return whether a tensor holds the matrices of experts."""
    return ".experts." in name


def _active_elements(name: str, tensor: Any, config: Any) -> int:
    """Return how many of a tensor's weights each token is multiplied with.

    Only the experts that are active for a token count.
    """
    if tensor.dim() < 2:
        return 0
    count = _experts(config)
    if count and _is_expert(name):
        return int(tensor.numel()) * _active_experts(config) // count
    return int(tensor.numel())


def _mlp_width(config: Any) -> int:
    """Return the intermediate size of the MLP, of all experts that are active for a token."""
    if _experts(config):
        inner = getattr(config, "ffn_config", None)
        widths = (getattr(config, "moe_intermediate_size", None),
                  getattr(config, "intermediate_size", None),
                  getattr(inner, "ffn_hidden_size", None))  # fmt: skip
        width = next((w for w in widths if w), 4 * int(config.hidden_size))
        return int(width) * _active_experts(config)
    for name in ("intermediate_size", "n_inner", "ffn_dim"):
        if width := getattr(config, name, None):
            # A list has the width of each layer; the largest needs the most memory.
            return int(max(width) if isinstance(width, list | tuple) else width)
    return 4 * int(config.hidden_size)


def _window(config: Any, index: int) -> int | None:
    """Return the size of a layer's sliding attention window, or None if it has none."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and index < len(kinds) and kinds[index] != "sliding_attention":
        return None
    return int(window)


def _plain_attention(config: Any) -> bool:
    """Return whether Penstock's attention kernels support the model."""
    extras = ("attention_dropout", "attn_pdrop", "v_head_dim", "attention_probs_dropout_prob")
    _, size = _attention_heads(config)
    return size <= 256 and size % 8 == 0 and not any(getattr(config, n, None) for n in extras)
