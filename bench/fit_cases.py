"""Random models and workloads for `fit_campaign.py`.

A case follows from the seed of the campaign and its number alone, so one case can be repeated
without the others. Sizes are odd on purpose: constants that were fitted to the sizes of published
models do not describe them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

STANDARD = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "olmo2", "phi3",
            "gpt_neox", "granite")  # fmt: skip
"""Model types that most cases have."""

OTHERS = ("starcoder2", "stablelm", "cohere", "cohere2", "glm", "glm4", "smollm3", "olmo", "olmo3",
          "ministral", "exaone4", "helium", "seed_oss", "ernie4_5", "arcee", "hunyuan_v1_dense",
          "nemotron", "persimmon", "gpt2", "opt", "phi", "gemma")  # fmt: skip
"""Further model types with standard blocks."""

OTHERS_SHARE = 0.2

WIDE_AS_HEADS = ("helium",)
"""Families that run only if the heads together are as wide as the hidden states."""

PARTLY_ROTATED = ("gpt_neox", "stablelm", "glm", "glm4", "nemotron", "persimmon", "phi")
"""Model types that rotate a quarter or half of a head, which must be an even number."""

HEAD_SIZES = (32, 40, 48, 56, 64, 72, 80, 96, 104, 112, 128, 160, 192, 256)
ODD_HEAD_SIZES = (36, 50, 60, 66, 84, 100, 130)
"""Sizes that no attention kernel takes as they are."""

FREEZE = ("*embed*", "*mlp*", "*norm*", "*layers.0.*", "*.bias", "*self_attn*")


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a case may be."""

    parameters: float = 6e8
    tokens: int = 24_000
    context: tuple[int, int] = (65, 6000)
    hidden: tuple[int, int] = (256, 2048)
    vocabulary: tuple[int, int] = (32_000, 262_144)


TINY = Limits(parameters=2e6, tokens=400, context=(17, 60), hidden=(32, 96), vocabulary=(500, 3000))
"""Limits for rehearsals without a GPU."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model and one workload."""

    seed: int
    number: int
    family: str
    config: dict[str, Any]
    """Arguments of the model's `transformers` configuration."""
    context: int
    batch: int
    micro_batch: int | None
    """None: Penstock chooses it."""
    packed: bool
    """Whether rows are packed with documents of random lengths."""
    moments: str
    clip: float
    freeze: tuple[str, ...]
    compiled: bool
    parameters: int = field(default=0)
    """Number of parameters, roughly."""

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"freeze": list(self.freeze)}


def draw_case(
    seed: int, number: int, *, compiled: float = 1.0, limits: Limits | None = None
) -> Case:
    """Draw case `number` of the campaign with this seed."""
    limits = limits or Limits()
    drawn = random.Random(f"{seed}/{number}")
    family = drawn.choice(OTHERS if drawn.random() < OTHERS_SHARE else STANDARD)
    context, batch = _draw_rows(drawn, limits)
    micro_batch = None if drawn.random() < 0.4 else drawn.randint(1, batch)
    config = _draw_config(drawn, family, context, limits)
    parameters = _parameters(config)
    while parameters > limits.parameters:
        config["vocab_size"] = max(limits.vocabulary[0], config["vocab_size"] // 2 + 1)
        config["intermediate_size"] = max(config["hidden_size"], config["intermediate_size"] // 2)
        parameters, before = _parameters(config), parameters
        if parameters == before:
            break
    return Case(
        seed=seed, number=number, family=family, config=config, context=context, batch=batch,
        micro_batch=micro_batch, packed=drawn.random() < 0.5,
        moments=drawn.choice(("fp32", "fp32", "bf16", "int8")),
        clip=drawn.choice((1.0, 1.0, 0.0)),
        freeze=(drawn.choice(FREEZE),) if drawn.random() < 0.25 else (),
        compiled=drawn.random() < compiled, parameters=parameters,
    )  # fmt: skip


def _draw_rows(drawn: random.Random, limits: Limits) -> tuple[int, int]:
    context = _log_uniform(drawn, *limits.context)
    batch = drawn.randint(1, 13)
    return context, max(1, min(batch, limits.tokens // context))


def _draw_config(drawn: random.Random, family: str, context: int, limits: Limits) -> dict[str, Any]:
    known = default_fields(family)
    low, high = limits.hidden
    sizes = [size for size in HEAD_SIZES if size <= high // 2]
    if drawn.random() < 0.15 and family not in PARTLY_ROTATED:
        sizes = [size for size in ODD_HEAD_SIZES if size <= high // 2] or sizes
    head = drawn.choice(sizes)
    heads = drawn.randint(max(1, -(-low // head)), max(1, high // head))
    config: dict[str, Any] = {
        "vocab_size": _maybe_round(drawn, _log_uniform(drawn, *limits.vocabulary), 0.3),
        "hidden_size": heads * head,
        "num_hidden_layers": drawn.randint(2, 4),
        "num_attention_heads": heads,
        "tie_word_embeddings": drawn.random() < 0.5,
        "max_position_embeddings": context + drawn.choice((0, 1, 500)),
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if "head_dim" in known:
        config["head_dim"] = head
    if "head_dim" in known and family not in WIDE_AS_HEADS:
        # transformers requires a multiple of the number of heads, for any head size.
        every = [size for size in range(low, high + 1) if size % math.lcm(2, heads) == 0]
        rounded = [size for size in every if size % 8 == 0]
        config["hidden_size"] = drawn.choice(
            (rounded if rounded and drawn.random() < 0.9 else every) or [heads * head]
        )
    if "num_key_value_heads" in known:
        config["num_key_value_heads"] = drawn.choice(
            [n for n in range(1, heads + 1) if not heads % n]
        )
    mlp = int(config["hidden_size"] * drawn.uniform(1.5, 5.0))
    config["intermediate_size"] = _maybe_round(drawn, mlp, 0.6)
    return config | _special_fields(drawn, family, context, head, config["num_hidden_layers"])


def _special_fields(
    drawn: random.Random, family: str, context: int, head: int, layers: int
) -> dict[str, Any]:
    """Return the fields of the families with windows or with scores that are scaled otherwise."""
    fields: dict[str, Any] = {}
    known = default_fields(family)
    if family in ("gemma2", "gemma3_text"):
        fields["query_pre_attn_scalar"] = head
    if family in ("qwen2", "qwen3"):
        fields["use_sliding_window"] = drawn.random() < 0.3
    if "sliding_window" in known:
        fields["sliding_window"] = drawn.randint(max(1, context // 4), 2 * context)
    if "layer_types" in known and family not in ("qwen2", "qwen3"):
        kinds = ("full_attention", "sliding_attention")
        windowed = family in ("gemma2", "gemma3_text", "cohere2", "olmo3", "ministral", "exaone4")
        fields["layer_types"] = [
            drawn.choice(kinds if windowed else kinds[:1]) for _ in range(layers)
        ]
    return fields


@cache
def default_fields(family: str) -> Mapping[str, Any]:
    """Return the fields of a model type's default configuration."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    default = CONFIG_MAPPING[family]()
    return {**default.to_dict(), **vars(default)}


def make_config(case: Case) -> Any:
    """Return the case's `transformers` configuration."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[case.family](**case.config)


def _parameters(config: Mapping[str, Any]) -> int:
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    tables = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
    return int(tables + config["num_hidden_layers"] * hidden * (4 * hidden + 3 * mlp))


def _log_uniform(drawn: random.Random, low: int, high: int) -> int:
    return int(math.exp(drawn.uniform(math.log(low), math.log(high))))


def _maybe_round(drawn: random.Random, value: int, share: float) -> int:
    """Round a share of the values down to multiples of 64 or 8."""
    if drawn.random() >= share:
        return value
    unit = drawn.choice((64, 8))
    return max(unit, value // unit * unit)


def draw_batches(case: Case, count: int) -> Iterator[dict[str, Any]]:
    """Return batches of random tokens, packed if the case says so, some labels ignored."""
    import torch

    drawn = torch.Generator().manual_seed(case.seed % (1 << 31) + case.number)
    shape = (case.batch, case.context)
    for _ in range(count):
        ids = torch.randint(3, case.config["vocab_size"], shape, generator=drawn)
        labels = ids.clone()
        labels[torch.rand(shape, generator=drawn) < 0.2] = -100
        batch = {"input_ids": ids, "labels": labels}
        if case.packed:
            starts = torch.rand(shape, generator=drawn) < 4 / case.context
            starts[:, 0] = True
            at = torch.arange(case.context).expand(shape)
            batch["position_ids"] = at - (at * starts).cummax(dim=1).values
        yield batch
