"""What lies before the first layer and after the last is differentiated like the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.roles import Role
from tests.equivalence.runs import DISK, DRAM, RESIDENT, Setup, Way, differing, train, whole
from tests.support import engines
from tests.support.plain_loop import PlainLoop

TINY: dict[str, Any] = {"vocab_size": 260, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip

CONFIGS = {
    # Scales its embeddings in place.
    "CTRL": transformers.CTRLConfig(
        n_embd=32, n_layer=3, n_head=4, n_positions=64, dff=64, resid_pdrop=0.0, embd_pdrop=0.0,
        **TINY,
    ),
    # A norm without weights between the embedding and the first layer.
    "NanoChat": transformers.NanoChatConfig(**TINY, **SIZES),
    "NanoChat, tied": transformers.NanoChatConfig(tie_word_embeddings=True, **TINY, **SIZES),
    # Projections before the first layer and after the last.
    "OPT-350m": transformers.OPTConfig(
        hidden_size=32, ffn_dim=64, num_hidden_layers=3, num_attention_heads=4, dropout=0.0,
        max_position_embeddings=64, word_embed_proj_dim=16, do_layer_norm_before=False, **TINY,
    ),
    # A norm with weights between the embedding and the first layer.
    "ModernBERT decoder": transformers.ModernBertDecoderConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=64, local_attention=8, **TINY,
    ),
}  # fmt: skip

PLAIN: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


@pytest.mark.parametrize("way", [RESIDENT, DRAM, DISK], ids=["resident", "dram", "disk"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_gradient_equals_that_of_the_plain_model(name: str, way: Way, tmp_path: Path) -> None:
    """Compare each tensor to 1 %: a tied table's two gradients are added in bf16 by torch."""
    config = CONFIGS[name]
    model, work = engines.inventory(config), engines.workload(batch=5, clip=None)
    plain = engines.plain_model(config)
    batch = engines.batches(1, work, config.vocab_size)[0]
    loop = PlainLoop(plain, micro_batch=2, clip=None, settings=PLAIN)
    expected, loss = loop.gradients(batch)
    disk = tmp_path if way is DISK else None
    plan = engines.make_plan_of(model, work, way.rows(len(model.blocks)), disk=disk)
    with engines.make_engine(config, plan, model, plain) as engine:
        assert float(engine.forward_backward(batch)) == pytest.approx(loss, rel=1e-5)
        gradients = {tensor: whole(engine, tensor, Role.GRADIENT).float() for tensor in expected}
    assert differing_gradients(gradients, expected) == []


LINEAR = {"CTRL"}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_embedding_that_is_not_linear_is_recognized(name: str) -> None:
    assert engines.inventory(CONFIGS[name]).linear_embedding == (name in LINEAR)


@pytest.mark.parametrize("rounds", [1, 3])
def test_every_plan_gives_the_same_bits(rounds: int, tmp_path: Path) -> None:
    """The embedding is fetched again for its backward, also in every round and in small pieces."""
    setup = Setup(
        config := CONFIGS["NanoChat"], engines.inventory(config),
        engines.workload(batch=5, clip=0.5), engines.plain_model(config),
    )  # fmt: skip
    pieces = {"rounds": rounds, "slots": 4, "ahead": 2, "piece": 4096}
    ways = (RESIDENT, Way("streamed", ("nnnn", "ddnn"), pieces))
    first, second = (train(setup, way, tmp_path, steps=3) for way in ways)
    assert (first.losses, first.norms) == (second.losses, second.norms)
    assert differing(first.state, second.state) == []


def differing_gradients(
    gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> list[str]:
    """Return the names of tensors whose gradient differs by more than 1 %."""
    # Gradients of rounding error only, as that of a key's bias, cannot be compared.
    noise = 1e-6 * max(float(gradient.norm()) for gradient in expected.values())
    return [
        name
        for name, gradient in expected.items()
        if (gradients[name].view_as(gradient) - gradient).norm() > 0.01 * gradient.norm() + noise
    ]
