"""The registry of attention implementations: names, scopes and configs."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from penstock.errors import UnsupportedModelError
from penstock.generate.attention import register_row_attention
from penstock.model.attention import (
    CACHED_ROWS,
    DOCUMENTS,
    AttentionOptions,
    attending_over,
    attention_configs,
    attention_function,
    current_scope,
    using_attention,
)
from penstock.model.document_attention import register_document_attention


def record_options(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    vars(module)["options"] = options
    return query


class Part(nn.Module):
    def __init__(self, config: Any, *parts: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.parts = nn.ModuleList(parts)


def test_an_implementation_gets_the_options_that_transformers_passes() -> None:
    module, tensor = nn.Module(), torch.zeros(1, 2, 3, 4)

    output, weights = attention_function(record_options)(
        module, tensor, tensor, tensor, None, scaling=0.5, sliding_window=8, is_causal=True
    )

    assert output is tensor
    assert weights is None
    assert vars(module)["options"] == AttentionOptions(0.5, 0.0, 8, None)


@pytest.mark.parametrize("unsupported", ["attention_mask", "s_aux"])
def test_masks_and_sinks_are_refused(unsupported: str) -> None:
    tensor = torch.zeros(1, 2, 3, 4)
    arguments = {"attention_mask": None} | {unsupported: tensor}

    with pytest.raises(UnsupportedModelError, match=r"mask|sinks"):
        attention_function(record_options)(nn.Module(), tensor, tensor, tensor, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"is_causal": False}, "later tokens"),
        ({"position_bias": torch.zeros(1)}, "Module passes position_bias"),
        ({"alibi_slopes": (1.0, 0.5)}, "alibi_slopes"),
    ],
)
def test_requests_that_are_not_known_are_refused(arguments: Any, message: str) -> None:
    tensor = torch.zeros(1, 2, 3, 4)
    call = attention_function(record_options)

    with pytest.raises(UnsupportedModelError, match=message):
        call(nn.Module(), tensor, tensor, tensor, None, **arguments)

    known = dict.fromkeys(arguments)
    call(nn.Module(), tensor, tensor, tensor, None, **known, position_ids=tensor, use_cache=True)


def test_training_and_generation_have_names_of_their_own() -> None:
    register_document_attention()
    register_row_attention()
    interface: Any = AttentionInterface
    known = interface()

    assert known[DOCUMENTS] is not known[CACHED_ROWS]


def test_a_scope_ends_with_its_block() -> None:
    with attending_over("outer"):
        with attending_over("inner"):
            assert current_scope() == "inner"
        assert current_scope() == "outer"

    assert current_scope() is None


def test_a_scope_is_seen_by_its_own_thread_only() -> None:
    seen = []
    with attending_over("here"):
        thread = threading.Thread(target=lambda: seen.append(current_scope()))
        thread.start()
        thread.join()

    assert seen == [None]


def test_configs_are_found_once_and_restored() -> None:
    first, second = (SimpleNamespace(_attn_implementation=name) for name in ("sdpa", "eager"))
    model = Part(first, Part(second), Part(first), nn.Linear(1, 1))

    configs = attention_configs(model, Part(second))
    with using_attention(configs, CACHED_ROWS):
        during = [config._attn_implementation for config in (first, second)]

    assert configs == [first, second]
    assert during == [CACHED_ROWS, CACHED_ROWS]
    assert (first._attn_implementation, second._attn_implementation) == ("sdpa", "eager")
