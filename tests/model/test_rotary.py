"""Rotary embeddings that depend on the length of a sequence use that of each document."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from penstock.model.meta_model import build_model
from penstock.model.rotary import document_lengths

LIMIT = 6
ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": LIMIT, "short_factor": [1.0, 1.1, 1.3, 1.5],
        "long_factor": [2.0, 3.0, 5.0, 7.0]}  # fmt: skip


def phi(**changes: Any) -> Any:
    values = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "original_max_position_embeddings": LIMIT, "pad_token_id": 0, "rope_parameters": ROPE,
    }  # fmt: skip
    return transformers.Phi3Config(**values | changes)


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [
        ([0, 1, 2, 3], [4, 4, 4, 4]),
        ([0, 1, 0, 0], [2, 2, 1, 1]),
        ([0, 0, 1, 2], [1, 3, 3, 3]),
        ([37], [38]),  # a token that is generated
        ([5, 6, 0, 1], [7, 7, 2, 2]),
    ],
)
def test_lengths_of_documents(positions: list[int], lengths: list[int]) -> None:
    found = document_lengths(torch.tensor([positions, positions]))
    assert found.tolist() == [lengths, lengths]


def test_a_long_document_does_not_change_a_short_one() -> None:
    config = phi()
    ours = build_model(config, torch.float32, torch.device("cpu")).model.rotary_emb
    plain = transformers.Phi3Model(config).rotary_emb
    x = torch.zeros(1)
    documents = [[0, 1, 2], list(range(LIMIT + 1)), list(range(LIMIT))]
    row = torch.tensor([[p for document in documents for p in document]] * 2)

    tables = ours(x, position_ids=row)

    alone = [plain(x, torch.tensor([document])) for document in documents]
    for table, expected in zip(tables, zip(*alone, strict=True), strict=True):
        assert torch.equal(table, torch.cat(expected, 1).expand_as(table))
    together = plain(x, row)
    assert not torch.equal(together[0], tables[0]), "transformers decides for the whole batch"


def test_other_rotary_embeddings_are_not_touched() -> None:
    config = phi(rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    model = build_model(config, torch.float32, torch.device("cpu"))
    assert all("forward" not in vars(module) for module in model.modules())
