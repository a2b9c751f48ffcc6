"""Make a small twin of a model: the same code with tiny sizes, to try the code out on the CPU.

What a model computes depends on its class and on the fields of its config that are not sizes. A
twin has the same class and the same such fields, so what holds for the twin's code holds for the
model's. It keeps the first layers up to the one at which every kind of layer has occurred.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.metadata
import json
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from penstock.machine.user_cache import code_fingerprint
from penstock.model.adapters import Adapter
from penstock.model.compile import layer_kinds
from penstock.model.experts import has_fused_experts
from penstock.model.output_weight import output_weight

LAYERS = 2
"""Smallest number of layers of a twin."""

VOCABULARY = 64
HEADS, HEAD_SIZE = 4, 16
HIDDEN = HEADS * HEAD_SIZE
WINDOW = 4
"""Size of a sliding window: small enough that it hides tokens of a short row."""

SIZES: Mapping[str, int] = {
    "hidden_size": HIDDEN,
    "d_model": HIDDEN,
    "word_embed_proj_dim": HIDDEN,
    "vocab_size": VOCABULARY,
    "n_positions": 64,
    "max_position_embeddings": 64,
    "intermediate_size": 96,
    "n_inner": 96,
    "ffn_dim": 96,
    "dff": 96,
    "decoder_ffn_dim": 96,
    "ffn_hidden_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "prefix_dense_intermediate_size": 96,
    "num_attention_heads": HEADS,
    "attention_heads": HEADS,
    "num_heads": HEADS,
    "n_heads": HEADS,
    "n_head": HEADS,
    "head_dim": HEAD_SIZE,
    "indexer_head_dim": HEAD_SIZE,
    "index_head_dim": 2 * HEAD_SIZE,
    "index_n_heads": 2,
    "global_head_dim": HEAD_SIZE,
    "kv_channels": HEAD_SIZE,
    "rotary_dim": HEAD_SIZE // 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": HEAD_SIZE,
    "qk_head_dim": 8 + HEAD_SIZE,
    "v_head_dim": 8,
    "lru_width": HIDDEN,
    "rnn_hidden_size": HIDDEN,
    "attention_hidden_size": HIDDEN,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "mamba_n_heads": 2 * HEADS,
    "mamba_d_head": HEAD_SIZE,
    "mamba_d_ssm": 2 * HIDDEN,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": HEAD_SIZE,
    "linear_value_head_dim": HEAD_SIZE,
}
"""Fields that are sizes, by the names that model families give them, and the sizes of a twin.
A field that a config does not have, or whose value is None, stays as it is."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOICES = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k")
EXPERTS: Mapping[str, int] = {
    **dict.fromkeys(EXPERT_COUNTS, 16),
    **dict.fromkeys(CHOICES, 4),
    **dict.fromkeys(("n_group", "num_expert_group"), 4),
    "topk_group": 2,
}
"""Counts of experts, of which a twin has no more than these. Each group of 16 experts in 4 groups
has as many as a token chooses."""

WINDOWS = (
    *("sliding_window", "attention_window_size", "window_size", "attention_chunk_size"),
    "floor_scale",  # Llama 4 scales queries by how many of these come before them in the row
)
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads")
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "padding_idx")
DROPOUTS = (
    *("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout"),
    *("activation_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "emb_pdrop"),
    *("residual_dropout", "embedding_dropout", "attention_dropout_prob", "resid_dropout"),
)


PACKAGES = ("torch", "transformers", "triton", "peft")
"""Packages whose version may change what a twin computes."""

NOT_COMPUTED = ("transformers_version", "torch_dtype", "dtype", "architectures", "use_cache")
"""Fields of a config that do not change what a model computes, or that Penstock sets itself."""


def twin_config_of(model: nn.Module, layers_path: str) -> Any:
    """Return the config of a model's twin, with the first layers until every kind has occurred.

    The model may be on the meta device. A config's own checks may raise any exception.
    """
    found: Any = model.get_submodule(layers_path)
    kinds = list(
        zip(layer_kinds(list(found)), *_layer_names(model.config, len(found)), strict=True)
    )
    firsts = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    count = min(len(kinds), max(LAYERS, *(index + 1 for index in firsts.values()), 0))
    return twin_config(model.config, count)


def _layer_names(config: Any, layers: int) -> list[list[str]]:
    """Return the lists of a config with a name for each layer, such as `layer_types`.

    Models choose a layer's mask by such a name, of which the layer's modules may know nothing.
    """
    return [
        value
        for value in vars(config).values()
        if isinstance(value, list) and len(value) == layers
        if all(isinstance(name, str) for name in value)
    ]


def twin_class(model: nn.Module) -> type:
    """Return the class of a model's twin: its own, or the causal language model of its family.

    A model for classification has the layers of the causal language model, and a head that the
    caller's own code computes.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if output_weight(model) is None and type(model.config) in known:
        return known[type(model.config)]  # type: ignore[no-any-return]
    return type(model)


def twin_key(model_class: type, twin: Any, *others: object) -> str:
    """Return a hash of everything that the result of running a twin depends on.

    That is its class and config, the code of both, and the versions of `PACKAGES`. `others` are
    values that can be written as JSON.
    """
    config = {
        name: value
        for name, value in twin.to_dict().items()
        if not name.startswith("_") and name not in NOT_COMPUTED
    }
    name = f"{model_class.__module__}.{model_class.__qualname__}"
    versions = [_version(package) for package in PACKAGES]
    parts = [name, config, others, versions, code_fingerprint(), _code_of(model_class)]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _code_of(model_class: type) -> str:
    """Return a hash of the functions in the modules of a class, as they are in memory.

    Libraries and users replace methods of transformers' classes, such as the forward of an
    attention, and the version of transformers does not tell.
    """
    digest = hashlib.sha256()
    names = {each.__module__ for each in model_class.__mro__ if each.__module__ != "builtins"}
    for name in sorted(names):
        if name.partition(".")[0] == "torch" or name not in sys.modules:
            continue
        for attribute, value in sorted(vars(sys.modules[name]).items()):
            own = vars(value).items() if isinstance(value, type) else ((attribute, value),)
            for member, function in own:
                for code in _codes(function):
                    digest.update(f"{attribute}.{member}: {code!r}\n".encode())
    return digest.hexdigest()


def _codes(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the content of a function's code, and of the functions that it wraps."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
    while isinstance(value, types.FunctionType):
        yield (value.__module__, value.__qualname__, *_content(value.__code__))
        value = getattr(value, "__wrapped__", None)


def _content(code: types.CodeType) -> tuple[Any, ...]:
    constants = [
        _content(each)
        if isinstance(each, types.CodeType)
        else sorted(map(repr, each))  # the order of a set differs between processes
        if isinstance(each, frozenset)
        else each
        for each in code.co_consts
    ]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def is_known_code(model_class: type) -> bool:
    """Return whether a class is transformers' own, so that its version says what it computes."""
    return model_class.__module__.startswith("transformers.")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def twin_config(config: Any, layers: int) -> Any:
    """Return a copy of a config with tiny sizes, the first `layers` layers and no dropout."""
    twin = copy.deepcopy(config)
    _shrink_fields(twin)
    _keep_layers(twin, config, layers)
    _shrink_rotary(twin)
    return twin


def _shrink_fields(twin: Any) -> None:
    heads = _heads(twin)
    decoupled = isinstance(_field(twin, "head_dim"), int) and heads * twin.head_dim != _width(twin)
    decoupled = decoupled and not isinstance(_field(twin, "expand"), int)  # of a state space model
    shared = {name: _field(twin, name) for name in KEY_VALUE_HEADS}
    for name, size in SIZES.items():
        value = _field(twin, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            _set(twin, name, size)
        elif isinstance(value, list):
            _set(twin, name, [size] * len(value))  # one entry for each layer
    if hasattr(type(twin), "head_dim") and _field(twin, "head_dim") is None:
        _set(twin, "head_dim", HEAD_SIZE)  # some classes compute with it without a default
    if isinstance(_field(twin, "expand"), int) and isinstance(_field(twin, "num_heads"), int):
        _set(twin, "num_heads", twin.expand * HIDDEN // HEAD_SIZE)  # of a state space model
    if decoupled and _field(twin, "hidden_size"):
        twin.hidden_size = HIDDEN + HEADS * 8  # heads are not the hidden size divided, as here
    for name, count in shared.items():
        if isinstance(count, int) and count > 0:
            # One head for each query, one for all queries, or groups, as in the model.
            setattr(twin, name, HEADS if count == heads else 1 if count == 1 else HEADS // 2)
    for name, most in EXPERTS.items():
        if isinstance(count := _field(twin, name), int) and not isinstance(count, bool):
            _set(twin, name, min(count, most))
    for name in WINDOWS:
        if isinstance(_field(twin, name), int):
            setattr(twin, name, min(_field(twin, name), WINDOW))
    for name in TOKENS:
        if isinstance(_field(twin, name), int):
            setattr(twin, name, 0)
    for name in DROPOUTS:
        if isinstance(_field(twin, name), float | int):
            _set(twin, name, type(_field(twin, name))(0))
    inner = _field(twin, "ffn_config")  # DBRX keeps its experts' fields here
    for name, size in (("hidden_size", _width(twin)), ("ffn_hidden_size", 96)):
        if isinstance(_field(inner, name), int):
            setattr(inner, name, size)
    inner = _field(twin, "attn_config")  # MPT keeps its attention's fields here
    if isinstance(_field(inner, "attn_pdrop"), float | int):
        inner.attn_pdrop = type(inner.attn_pdrop)(0)


def choose_all_experts(config: Any) -> Any:
    """Return a copy of a config in which every token chooses all experts.

    In 16 bits, rounding changes which experts some tokens choose, and results as a whole. This way
    there is nothing to choose.
    """
    chosen = copy.deepcopy(config)
    for part in (chosen, _field(chosen, "ffn_config")):
        counts = (_field(part, name) for name in EXPERT_COUNTS)
        count = next((each for each in counts if isinstance(each, int) and each > 0), None)
        for name in CHOICES if count is not None else ():
            if isinstance(_field(part, name), int):
                _set(part, name, count)
    groups = _field(chosen, "n_group")
    if isinstance(groups, int) and isinstance(_field(chosen, "topk_group"), int):
        _set(chosen, "topk_group", groups)
    return chosen


def _keep_layers(twin: Any, config: Any, layers: int) -> None:
    total = next((c for n in LAYER_COUNTS if isinstance(c := _field(config, n), int)), layers)
    for name, value in list(vars(twin).items()):
        if isinstance(value, list) and len(value) == total and total > 1:
            setattr(twin, name, value[:layers])
    for name in LAYER_COUNTS:
        if isinstance(_field(twin, name), int):
            _set(twin, name, layers)
    shared = _field(twin, "num_kv_shared_layers")
    if isinstance(shared, int) and shared > 0:
        twin.num_kv_shared_layers = min(shared, layers // 2)  # the last layers


def _shrink_rotary(twin: Any) -> None:
    """Shorten the lists of a rotary embedding that have an entry for each pair of dimensions."""
    for parameters in _dictionaries(_field(twin, "rope_parameters")):
        partial = parameters.get("partial_rotary_factor") or _field(twin, "partial_rotary_factor")
        pairs = int(HEAD_SIZE * (partial if isinstance(partial, float | int) else 1)) // 2
        for name in ("short_factor", "long_factor"):
            if isinstance(parameters.get(name), list):
                # Repeated if the model's heads are smaller than the twin's.
                parameters[name] = (parameters[name] * pairs)[:pairs]
        if isinstance(parameters.get("mrope_section"), list):
            rest = pairs // 4
            parameters["mrope_section"] = [pairs - 2 * rest, rest, rest]


def _dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    """Yield a dictionary and the dictionaries in it: some models have one for each layer type."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _dictionaries(inner)


def _field(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a config whose layers differ in this field refuses to return one value
        return None


def _set(config: Any, name: str, value: Any) -> None:
    with contextlib.suppress(AttributeError, NotImplementedError):  # computed from other fields
        setattr(config, name, value)


def _heads(config: Any) -> int:
    names = ("num_attention_heads", "attention_heads", "num_heads", "n_heads", "n_head")
    return next((v for n in names if isinstance(v := _field(config, n), int)), 1)


def _width(config: Any) -> int:
    return next(
        (v for n in ("hidden_size", "d_model") if isinstance(v := _field(config, n), int)), 0
    )


def build_twin(
    model_class: type,
    config: Any,
    attention: str | None,
    dtype: torch.dtype = torch.float32,
    adapter: Adapter | None = None,
) -> nn.Module:
    """Build a twin from its config on the CPU; the same weights every time.

    Weights are larger than transformers draws them, so that everything that a layer computes shows
    in its output. `attention` is the name of the attention function, None for the one that
    transformers chooses for the class. `adapter` is put into the twin's layers.
    """
    make: Any = model_class
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        # The CPU's generator only: `torch.manual_seed` would seed the user's GPU as well.
        torch.default_generator.manual_seed(0)
        model: nn.Module = make._from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation=attention
        )
        if adapter is not None:
            adapter.attach_to_twin(model)
    generator = torch.Generator().manual_seed(1)
    fused = (module for module in model.modules() if has_fused_experts(module))
    experts = {p for module in fused for p in module.parameters() if p.dim() == 3}
    scales = {} if adapter is None else _adapter_scales(model, adapter)
    with torch.no_grad(), torch.device("cpu"):
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if parameter.dim() < 2:
                noise = parameter.float() + 0.1 * noise  # norms, biases and decay rates
            elif parameter in experts:
                noise *= parameter.shape[-1] ** -0.5  # one matrix for each expert
            else:
                noise *= parameter[0].numel() ** -0.5
            parameter.copy_(noise * scales.get(parameter, 1.0))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def _adapter_scales(model: nn.Module, adapter: Adapter) -> dict[nn.Parameter, float]:
    """Return factors for an adapter's matrices that undo a factor with which PEFT applies them.

    With `lora_alpha` 32 and rank 2, what an adapter adds would be 16 times as large as what it is
    added to. Softmax would choose one token, and rounding would decide which.
    """
    found: dict[nn.Parameter, float] = {}
    for path, module in model.named_modules():
        scaling: Any = getattr(module, "scaling", None)
        factor = scaling.get(adapter.name) if isinstance(scaling, dict) else None
        if not isinstance(factor, float | int) or factor <= 1:
            continue
        named = module.named_parameters(prefix=path)
        matrices = [p for name, p in named if p.dim() > 1 and adapter.is_own(name)]
        found |= {p: factor ** (-1 / len(matrices)) for p in matrices}
    return found
