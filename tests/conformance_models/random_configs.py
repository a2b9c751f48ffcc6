"""Random configs of the families that are right: odd sizes, and other code paths than the default.

The generator goes by the names of fields, like `tests.conformance_models.tiny`. A config that
transformers itself does not accept is drawn again.
"""

from __future__ import annotations

import random
from typing import Any

from tests.conformance_models.tiny import FAMILIES, LARGEST_TOKEN, tiny_config

_KEPT = frozenset((
    "is_decoder", "is_encoder_decoder", "use_cache", "add_cross_attention", "return_dict",
    "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "use_mamba_kernels",
    "use_bidirectional_attention", "is_causal", "tie_encoder_decoder", "tie_word_embeddings",
))  # fmt: skip
"""Fields that describe another model than a causal one, or how it is called."""

_CHOICES: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None, 5.0, 50.0),
    "final_logit_softcapping": (None, 3.0, 30.0),
    "logit_scale": (0.0625, 1.0, 3.0),
    "logits_scaling": (0.5, 1.0, 8.0),
    "embedding_multiplier": (0.25, 1.0, 12.0),
    "residual_multiplier": (0.22, 1.0),
    "attention_multiplier": (0.0078125, 0.5, 1.0),
    "query_pre_attn_scalar": (4, 24, 256),
    "rms_norm_eps": (1e-6, 1e-3),
    "layer_norm_eps": (1e-5, 1e-3),
    "layer_norm_epsilon": (1e-5, 1e-3),
    "hidden_act": ("silu", "gelu", "gelu_pytorch_tanh", "relu"),
    "hidden_activation": ("silu", "gelu_pytorch_tanh"),
    "activation_function": ("gelu_new", "relu", "silu"),
    "clip_qkv": (None, 0.5),
    "sliding_window": (1, 3, 7, 16, 40),
    "partial_rotary_factor": (0.25, 0.5, 1.0),
    "rotary_pct": (0.25, 0.5, 1.0),
    "no_rope_layer_interval": (1, 2, 3),
}


def random_config(family: str, draw: random.Random) -> Any:
    """Return a random config of a family; raises an exception if its class refuses it."""
    config = tiny_config(family)
    fields = config.to_dict()
    layers = draw.choice((1, 2, 3, 4))
    changes: dict[str, Any] = _sizes(fields, draw, layers)
    for name, value in fields.items():
        if name in _KEPT or name.startswith("_"):
            continue
        if isinstance(value, bool) and draw.random() < 0.3:
            changes[name] = not value
        elif name in _CHOICES and draw.random() < 0.5:
            changes[name] = draw.choice(_CHOICES[name])
        elif isinstance(value, list) and value and name.endswith(("_types", "_type")):
            changes[name] = [draw.choice(value) for _ in range(layers)]
    if isinstance(fields.get("rope_parameters"), dict):
        size = changes.get("head_dim") or changes["hidden_size"] // changes["num_attention_heads"]
        changes["rope_parameters"] = _rope(fields["rope_parameters"], draw, int(size))
    if draw.random() < 0.5:
        changes["tie_word_embeddings"] = draw.random() < 0.5
    drop = ("architectures", "transformers_version", "model_type", "per_layer_config")
    kept = {name: value for name, value in fields.items() if name not in drop}
    return type(config)(**kept | changes)


def _sizes(fields: dict[str, Any], draw: random.Random, layers: int) -> dict[str, Any]:
    heads = draw.choice((1, 2, 3, 4, 6))
    size = draw.choice((4, 8, 12, 16, 20))
    groups = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
    # Some classes do not have a head size of their own.
    free = fields.get("head_dim") is not None and draw.random() < 0.5
    hidden = draw.choice((24, 36, 40, 56)) if free else heads * size
    sizes = {
        "hidden_size": hidden, "n_embd": hidden, "d_model": hidden, "word_embed_proj_dim": hidden,
        "num_attention_heads": heads, "n_head": heads, "attention_heads": heads, "n_heads": heads,
        "num_key_value_heads": groups, "head_dim": size,
        "num_hidden_layers": layers, "n_layer": layers, "num_layers": layers,
        "intermediate_size": draw.randrange(17, 70), "ffn_dim": draw.randrange(17, 70),
        "n_inner": draw.randrange(17, 70),
        "vocab_size": LARGEST_TOKEN + draw.randrange(16, 60),
        "max_position_embeddings": draw.randrange(16, 70), "n_positions": draw.randrange(16, 70),
    }  # fmt: skip
    return {name: value for name, value in sizes.items() if name in fields}


def _rope(fields: dict[str, Any], draw: random.Random, size: int) -> dict[str, Any]:
    """Return rotary parameters of a random type; those of models with several are kept."""
    if "rope_type" not in fields:
        return fields
    new = {k: v for k, v in fields.items() if k in ("rope_theta", "mrope_section")}
    new["rope_theta"] = draw.choice((100.0, 10000.0, 1e6))
    if "partial_rotary_factor" in fields:
        new["partial_rotary_factor"] = draw.choice((0.5, 1.0))
    kind = draw.choice(("default", "linear", "dynamic", "yarn", "llama3", "longrope"))
    pairs = int(size * float(new.get("partial_rotary_factor", 1.0))) // 2
    more: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 2.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8},
        "longrope": {"short_factor": [1.0 + 0.1 * i for i in range(pairs)],
                     "long_factor": [2.0 + 0.3 * i for i in range(pairs)],
                     "original_max_position_embeddings": draw.choice((8, 32)), "factor": 2.0},
    }  # fmt: skip
    return {**new, "rope_type": kind, **more[kind]}


def draw_case(seed: int, families: list[str]) -> tuple[str, Any]:
    """Return a family and a config that its class accepts. The same seed gives the same case."""
    draw = random.Random(seed)
    while True:
        family = draw.choice(families)
        assert family in FAMILIES
        try:
            return family, random_config(family, draw)
        except Exception:  # a config's own checks may raise any exception
            continue
