"""What a model is made of, from its config alone: no weights, no GPU, seconds. Room: measure.

The model is built on torch's meta device, where tensors have shapes and no bytes. Which class that
is, and how its tensors are tied, is for transformers to say; here its blocks are found.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import SurveyError
from penstock.model.config import load_config
from penstock.model.inventory import Block, Inventory, TensorSpec

if TYPE_CHECKING:
    from torch import nn

LAYER_LISTS = (
    "model.layers",
    "transformer.h",
    "gpt_neox.layers",
    "model.decoder.layers",
    "model.language_model.layers",
    "transformer.blocks",
    "backbone.layers",
)
"""Where families keep their layers, tried in turn."""

MOE = "mixture-of-experts models can be planned for but not trained yet"


def survey(
    model: str | Path,
    *,
    blocks: str | None = None,
    freeze: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> Inventory:
    """The inventory of a causal LM: a directory with `config.json`, or a Hugging Face id.

    `blocks` names the list of layers where it cannot be found; `freeze` holds patterns such as
    `model.embed_tokens.*` for tensors that are not trained.
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
) -> Inventory:
    """The same from a config that was read already."""
    body = _build(config, trust_remote_code)
    return survey_model(body, config, name=name, blocks=blocks, freeze=freeze)


def survey_model(
    body: nn.Module,
    config: Any,
    *,
    name: str,
    blocks: str | None = None,
    freeze: Sequence[str] = (),
) -> Inventory:
    """The inventory of a model that is there already, on any device."""
    path, layers = _find_layers(body, blocks)
    rows = _Rows(body, path, len(layers), freeze)
    made = [rows.embedding(), *(rows.layer(i, config) for i in range(len(layers))), rows.head()]
    return Inventory(
        model=name,
        architecture=type(body).__name__,
        hidden=int(config.hidden_size),
        vocabulary=int(config.vocab_size),
        max_context=getattr(config, "max_position_embeddings", None),
        blocks=tuple(made),
        caps_logits=bool(getattr(config, "final_logit_softcapping", None)),
        plain_attention=_plain_attention(config),
        not_trainable=MOE if _experts(config) else "",
    )


# Loading.


def _build(config: Any, trust_remote_code: bool) -> nn.Module:
    import torch
    import transformers

    try:
        with torch.device("meta"):
            make: Any = transformers.AutoModelForCausalLM
            body: nn.Module = make.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, ImportError, AttributeError) as problem:
        kind = getattr(config, "model_type", "?")
        raise SurveyError(
            f"transformers makes no causal language model of type {kind!r}: {problem}"
        ) from None
    return body


def _find_layers(body: nn.Module, blocks: str | None) -> tuple[str, nn.ModuleList]:
    from torch import nn

    tried = (blocks,) if blocks else LAYER_LISTS
    for path in tried:
        try:
            found = body.get_submodule(path)
        except AttributeError:
            continue
        if isinstance(found, nn.ModuleList) and len(found) > 0:
            return path, found
    lists = [p for p, m in body.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    raise SurveyError(
        f"no layers found in {type(body).__name__}: looked for a list of modules at "
        f"{', '.join(tried)}; it has lists at {', '.join(lists[:8]) or 'no place'}. "
        f"Name the right one with --blocks, such as `--blocks model.layers`"
    )


# Blocks.


class _Rows:
    """Deals a model's tensors out to blocks, each tensor once."""

    def __init__(self, body: nn.Module, path: str, count: int, freeze: Sequence[str]) -> None:
        self.body, self.path, self.freeze = body, path, freeze
        self.first_name: dict[int, str] = {}  # a shared tensor goes by its first name
        in_layers: dict[int, dict[str, Any]] = {i: {} for i in range(count)}
        self.outside: dict[str, Any] = {}
        self.again: list[tuple[str, str]] = []  # (another name, the first name)
        for name, tensor in body.named_parameters(remove_duplicate=False):
            if id(tensor) in self.first_name:
                self.again.append((name, self.first_name[id(tensor)]))
                continue
            self.first_name[id(tensor)] = name
            if name.startswith(f"{path}."):
                in_layers[int(name[len(path) + 1 :].split(".")[0])][name] = tensor
            else:
                self.outside[name] = tensor
        self.in_layers = in_layers

    def embedding(self) -> Block:
        names = [name for name in self.outside if name not in self._head_names()]
        return Block(name=self._name_of_input(), kind="embedding", tensors=self._specs(names))

    def layer(self, index: int, config: Any) -> Block:
        tensors = self.in_layers[index]
        heads = int(config.num_attention_heads)
        size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        return Block(
            name=f"{self.path}.{index}",
            kind="layer",
            tensors=self._specs(tensors),
            matmul_elements=sum(_active(name, t, config) for name, t in tensors.items()),
            query_width=heads * size,
            key_value_width=2 * kv_heads * size,
            mlp_width=_mlp_width(config),
            window=_window(config, index),
        )

    def head(self) -> Block:
        table = self.body.get_output_embeddings()  # type: ignore[operator]
        weight = getattr(table, "weight", None)
        if weight is None:
            raise SurveyError(f"{type(self.body).__name__} has no head that gives logits")
        owner = self.first_name[id(weight)]
        names = [name for name in self.outside if name in self._head_names()]
        return Block(
            name="lm_head" if owner not in names else owner.removesuffix(".weight"),
            kind="head",
            tensors=self._specs(names),
            borrows=() if owner in names else (owner,),
            matmul_elements=weight.numel(),
        )

    def _head_names(self) -> set[str]:
        """The output table and the last norm; everything else outside comes before the layers."""
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

    def _name_of_input(self) -> str:
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
            )
            for name in names
        )


# What configs call things.


def _experts(config: Any) -> int:
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if count := getattr(config, name, None):
            return int(count)
    return 0


def _active(name: str, tensor: Any, config: Any) -> int:
    """Weights of a layer that each token is multiplied with: of experts, the chosen ones."""
    if tensor.dim() < 2:
        return 0
    count = _experts(config)
    if count and ".experts." in name:
        chosen = int(getattr(config, "num_experts_per_tok", 1))
        return int(tensor.numel()) * chosen // count
    return int(tensor.numel())


def _mlp_width(config: Any) -> int:
    if _experts(config):
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        return int(width) * int(getattr(config, "num_experts_per_tok", 1))
    for name in ("intermediate_size", "n_inner", "ffn_dim"):
        if width := getattr(config, name, None):
            return int(width)
    return 4 * int(config.hidden_size)


def _window(config: Any, index: int) -> int | None:
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and index < len(kinds) and kinds[index] != "sliding_attention":
        return None
    return int(window)


def _plain_attention(config: Any) -> bool:
    """Scores that are scaled, masked, and nothing else; keys and values of one size."""
    extras = ("attn_logit_softcapping", "attention_dropout", "attn_pdrop", "v_head_dim",
              "attention_probs_dropout_prob")  # fmt: skip
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size <= 256 and size % 8 == 0 and not any(getattr(config, n, None) for n in extras)
