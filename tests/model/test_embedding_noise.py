"""NEFTune's noise: its size, its seeds, and the models that cannot take it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from penstock.engine.batches import split_batch
from penstock.errors import UnsupportedModelError
from penstock.model.embedding_noise import EmbeddingNoise, document_scales
from penstock.model.split import MicroBatch, SplitModel
from tests.support import engines

ALPHA, KEY = 5.0, 1234


def split_model(family: str = "llama", **changes: Any) -> SplitModel:
    config = engines.tiny_config(family, **changes)
    model = engines.plain_model(config, torch.float32)
    return SplitModel(model, engines.inventory(config), mlp_tile=4096, noise_alpha=ALPHA)


def micro_batch(rows: int = 2, length: int = 6, key: int = KEY) -> MicroBatch:
    positions = torch.arange(length).expand(rows, length)
    ids = torch.arange(rows * length).view(rows, length) + 3
    scales = document_scales(positions, torch.ones_like(ids, dtype=torch.bool))
    return MicroBatch(ids, positions, ids, None, 0, noise_scales=scales, noise_key=key)


def test_the_length_is_that_of_the_document_without_padding() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [4, 5, 0, 1, 2, 3]])
    counts = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()

    lengths = document_scales(positions, counts) ** -2

    expected = torch.tensor([[3, 3, 3, 2, 2, 1], [2, 2, 2, 2, 2, 2]])
    torch.testing.assert_close(lengths, expected.float())


def test_batches_carry_scales_only_if_the_run_has_noise() -> None:
    model = engines.inventory(engines.tiny_config("llama"))
    ids = torch.ones(1, 6, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    device = torch.device("cpu")

    for alpha, expected in ((0.0, None), (ALPHA, [0.5] * 6)):
        work = engines.workload(batch=1, micro_batch=1, neftune_noise_alpha=alpha)
        split = split_batch({"input_ids": ids, "attention_mask": mask}, work, model, 1, device)
        scales = split.rounds[0][0].noise_scales
        assert (None if scales is None else scales[0].tolist()) == expected


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gemma3", "bloom"])
def test_the_noise_is_that_of_transformers_with_the_same_seed(family: str) -> None:
    """For rows of one document each."""
    from transformers.integrations.neftune import activate_neftune

    ours, micro = split_model(family), micro_batch()
    ours.train(True)
    found = ours.embed(micro)[0]
    config = engines.tiny_config(family)
    plain = SplitModel(
        engines.plain_model(config, torch.float32), engines.inventory(config), mlp_tile=4096
    )
    without = plain.embed(micro)[0]
    activate_neftune(plain.model, ALPHA)
    plain.train(True)

    torch.manual_seed(KEY)
    expected = plain.embed(micro)[0]

    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, without)
    ours.train(False)
    assert torch.equal(ours.embed(micro)[0], without), "evaluation has no noise"


@torch.no_grad()
def test_the_noise_fills_its_range_and_depends_on_the_key() -> None:
    ours = split_model(hidden_size=64, head_dim=16)
    ours.train(False)
    micro = micro_batch(8, 16)
    without = ours.embed(micro)[0]
    ours.train(True)
    torch.manual_seed(1)
    noise, again = ours.embed(micro)[0] - without, ours.embed(micro)[0] - without
    micro.noise_key += 1
    other = ours.embed(micro)[0] - without

    limit = ALPHA / math.sqrt(16 * 64)
    assert 0.99 * limit < float(noise.abs().max()) <= 1.0001 * limit
    assert abs(float(noise.mean())) < 0.02 * limit
    assert torch.equal(noise, again)
    assert not torch.allclose(noise, other)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(1)))


class Twice(nn.Module):
    """Embeds its tokens twice, and has no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table(ids) + self.table(ids)
        return out


def test_an_embedding_that_runs_twice_is_refused() -> None:
    model, micro = Twice(), micro_batch()
    noise = EmbeddingNoise(model, model, ALPHA)
    assert micro.noise_scales is not None

    with (
        pytest.raises(UnsupportedModelError, match=r"alpha is 5, but .* of Twice: .* ran 2 times"),
        noise.added(KEY, micro.noise_scales),
    ):
        model(micro.input_ids)


def test_a_model_without_a_token_embedding_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="it has no module that embeds tokens"):
        EmbeddingNoise(nn.Linear(2, 2), nn.Identity(), ALPHA)


def test_a_model_that_looks_tokens_up_by_itself_is_refused_before_it_trains() -> None:
    model = split_model()
    table = model.model.get_input_embeddings()
    model.model.model.embed_tokens = _Lookup(table)

    with pytest.raises(UnsupportedModelError, match="its token embedding ran 0 times"):
        model.check_noise(torch.device("cpu"))


class _Lookup(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.tables = [table]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.tables[0].weight)  # type: ignore[arg-type]
