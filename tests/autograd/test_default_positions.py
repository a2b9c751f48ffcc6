"""Positions of tokens behind padding, where the caller passes none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import penstock as ps
from penstock.autograd.default_positions import count_all, count_shown, find_positions
from penstock.errors import UnsupportedModelError
from tests.autograd.test_own_loop import SMALL, one_group, padded_batch, z_loss
from tests.support.engines import plain_model

CPU = torch.device("cpu")


def test_a_model_that_counts_tokens_without_padding_equals_plain_torch() -> None:
    config = transformers.OPTConfig(
        vocab_size=260, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, dropout=0.0, attention_dropout=0.0, word_embed_proj_dim=16,
        do_layer_norm_before=False, pad_token_id=0,
    )  # fmt: skip
    plain = plain_model(config, torch.float32)
    torch_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01)
    model, optimizer = ps.stream(
        plain_model(config, torch.float32), **(SMALL | {"lr": 1e-2, "param_groups": one_group})
    )
    with model:
        for step in range(2):
            losses = []
            before = torch.get_rng_state()
            for one, updates in ((model, optimizer), (plain, torch_optimizer)):
                loss = z_loss(one, padded_batch(step))
                loss.backward()
                updates.step()
                updates.zero_grad()
                losses.append(loss.item())
                torch.set_rng_state(before)
            assert losses[0] == pytest.approx(losses[1], rel=1e-5), step
        found = model.state_dict()
    assert all(torch.allclose(found[n], t, atol=1e-5) for n, t in plain.state_dict().items())


def run(make: Any) -> Any:
    """Return code that looks up positions, and makes them if it gets none."""
    table = torch.arange(20.0)[:, None]

    def enter(attention_mask: torch.Tensor, position_ids: Any, **_: Any) -> Any:
        positions = make(attention_mask) if position_ids is None else position_ids
        return torch.nn.functional.embedding(positions, table), []

    return enter


@pytest.mark.parametrize("padding", [0, 1])
def test_padding_may_have_the_position_of_a_token(padding: int) -> None:
    def make(mask: torch.Tensor) -> torch.Tensor:
        return count_shown(mask, padding)

    mask = torch.tensor([[0, 0, 1, 1, 1]])
    found = find_positions(run(make), "Tiny", CPU)
    assert found(mask).tolist() == [[padding, padding, 0, 1, 2]]
    assert find_positions(run(count_all), "Tiny", CPU) is count_all


def test_other_positions_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Tiny.*neither.* Pass position_ids"):
        find_positions(run(lambda mask: 2 * mask), "Tiny", CPU)
    with pytest.raises(UnsupportedModelError, match="its code fails: IndexError"):
        find_positions(run(lambda mask: mask - 5), "Tiny", CPU)
