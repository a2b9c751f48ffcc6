"""A loss of the caller's own gives the bits of the engine's, under every plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import penstock as ps
from penstock.plan.workload import CallerLoss
from tests.support.engines import (
    batches,
    inventory,
    make_engine,
    make_plan_of,
    plain_model,
    tiny_config,
    workload,
)

ROWS, STEPS = 2, 3


def work(dtype: str, clip: float | None, **changes: Any) -> Any:
    return workload(context=16, batch=ROWS, dtype=dtype, clip=clip, accumulate=True, **changes)


def states(engine: Any) -> dict[str, torch.Tensor]:
    return {f"{n} {k}": t for n, s in engine.state.items() for k, t in s.items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def train_with_engine(
    config: Any, dtype: str, clip: float | None, device: str = "cpu"
) -> tuple[Any, float]:
    model, job = inventory(config), work(dtype, clip)
    plan = make_plan_of(model, job, "dddd")
    source = plain_model(config, torch.float32 if dtype == "fp32" else torch.bfloat16)
    with make_engine(config, plan, model, source, device=device) as engine:
        for batch in batches(2 * STEPS, job, config.vocab_size):
            items = int((batch["labels"][:, 1:] != -100).sum())
            engine.forward_backward(batch, num_items=2 * items)
            if engine.batches % 2 == 0:
                engine.apply()
        return states(engine), engine.grad_norm


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return half of the mean loss, as the engine computes it: from all positions of a row."""
    labels = functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    items = int((labels != -100).sum())
    logits = model(input_ids=batch["input_ids"]).logits.flatten(0, 1).float()
    labels = labels.to(logits.device)
    return functional.cross_entropy(logits, labels.flatten(), reduction="sum") / (2 * items)


def train_streamed(
    config: Any, dtype: str, clip: float | None, places: str | Sequence[str],
    disk: Path | None = None, device: str = "cpu", gpu_swept: Sequence[int] = (),
    interleaved: bool = False,
) -> tuple[Any, float]:  # fmt: skip
    job = replace(work(dtype, clip), caller_loss=CallerLoss(nbytes=1 << 20))
    plan = make_plan_of(
        inventory(config), job, places, disk=disk, piece=1 << 12, gpu_piece=1 << 12,
        gpu_swept=gpu_swept, interleaved=interleaved,
    )  # fmt: skip
    source = plain_model(config, torch.float32 if dtype == "fp32" else torch.bfloat16)
    model, optimizer = ps.stream(
        source, tokens=job.tokens, plan=plan, device=device, self_check=False, lr=1e-2,
        rehearse=False,
    )  # fmt: skip
    with model:
        for number, batch in enumerate(batches(2 * STEPS, job, config.vocab_size)):
            loss_of(model, {k: v.to(device) for k, v in batch.items()}).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return states(model.engine), model.engine.grad_norm


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_two_backward_passes_per_step_give_the_bits_of_the_engines_loss(
    dtype: str, tied: bool
) -> None:
    config = tiny_config("llama", tie_word_embeddings=tied)
    expected, norm = train_with_engine(config, dtype, 0.5)
    found, found_norm = train_streamed(config, dtype, 0.5, "dddd")
    assert found_norm == norm
    assert_equal(found, expected)


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_other_families_give_the_bits_of_the_engines_loss(family: str) -> None:
    config = tiny_config(family, tie_word_embeddings=family == "gpt2")
    expected, norm = train_with_engine(config, "bf16", 0.5)
    found, found_norm = train_streamed(config, "bf16", 0.5, "dddd")
    assert found_norm == norm
    assert_equal(found, expected)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "places",
    [
        "hhhh",
        "dndn",
        *(pytest.param(places, marks=pytest.mark.long) for places in ("dddh", "nddd", "nnnn")),
    ],
)
def test_every_plan_gives_the_same_bits(places: str, tied: bool, tmp_path: Path) -> None:
    config = tiny_config("llama", tie_word_embeddings=tied)
    expected, norm = train_streamed(config, "bf16", 0.5, "dddd")
    found, found_norm = train_streamed(config, "bf16", 0.5, places, tmp_path)
    assert found_norm == norm
    assert_equal(found, expected)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_sweeps_of_states_that_pass_through_the_device_give_the_same_bits(tied: bool) -> None:
    """The weights of the head, or of the tied embedding, are swept before the caller uses them."""
    config = tiny_config("llama", tie_word_embeddings=tied)
    expected, norm = train_streamed(config, "bf16", 0.5, "dddd")
    found, found_norm = train_streamed(config, "bf16", 0.5, "dddd", gpu_swept=(0, 2, 4))
    assert found_norm == norm
    assert_equal(found, expected)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_sweeps_between_pieces_from_disk_give_the_same_bits(tied: bool, tmp_path: Path) -> None:
    """The embedding and the second layer are on disk; what follows them is swept between."""
    config = tiny_config("llama", tie_word_embeddings=tied)
    expected, norm = train_streamed(config, "bf16", 0.5, "dddd")
    places = ["dndd", "dddd", "dndd", "dddd", "dddd"]
    found, found_norm = train_streamed(config, "bf16", 0.5, places, tmp_path, interleaved=True)
    assert found_norm == norm
    assert_equal(found, expected)


@pytest.mark.parametrize(
    "device",
    [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_devices_give_the_bits_of_their_own_engine(dtype: str, device: str) -> None:
    config = tiny_config("llama", hidden_size=64, head_dim=16)
    expected, norm = train_with_engine(config, dtype, 0.5, device)
    for places in ("dddd", "hhhh"):
        found, found_norm = train_streamed(config, dtype, 0.5, places, device=device)
        assert found_norm == norm
        assert_equal(found, expected)
