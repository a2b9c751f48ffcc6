"""The arms of RoundPipe: its preset for Llama, fp32 master weights, and its own CPU Adam.

By default its optimizer runs during the next step, which then computes with weights that are one
step old. That is faster, but a different algorithm, so `roundpipe-sync` is the arm to compare.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from bench.measuring import Batch
from bench.peers.work import Step, Work, build_model


@contextlib.contextmanager
def roundpipe_sync(work: Work) -> Iterator[Step]:
    with _started(work, stale=False) as step:
        yield step


@contextlib.contextmanager
def roundpipe_async(work: Work) -> Iterator[Step]:
    with _started(work, stale=True) as step:
        yield step


@contextlib.contextmanager
def _started(work: Work, *, stale: bool) -> Iterator[Step]:
    if work.dtype == "fp16":
        raise ValueError("the roundpipe arms support bf16 only: they set no loss scale")
    roundpipe: Any = importlib.import_module("roundpipe")
    preset: Any = importlib.import_module("roundpipe.models.llama")
    # It creates a mask with arguments that transformers has removed. SDPA is causal without a mask.
    preset.create_causal_mask = no_mask
    model = build_model(work, work.torch_dtype, torch.device("cpu"))
    model.gradient_checkpointing_disable()  # RoundPipe recomputes activations itself
    piped = roundpipe.wrap_model_to_roundpipe(
        model, use_sequential_preset=True, optim_dtype=torch.float32, name="bench"
    )
    parameters = list(piped.optim_parameters())
    optimizer = roundpipe.optim.Adam(parameters, decoupled_weight_decay=True, **work.adamw)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, work.clip)
        optimizer.step()
        optimizer.zero_grad()

    def step(batch: Batch) -> float:
        ids = batch["input_ids"]
        inputs = {
            "input_ids": ids,
            "labels": ids,
            "num_items_in_batch": ids.shape[0] * (ids.shape[1] - 1),
            "return_logits": False,  # use RoundPipe's chunked loss
        }
        loss = piped.forward_backward(input_kwargs=inputs, loss_fn=loss_of)
        piped.step(update, is_async=stale)
        return float(loss)

    yield step
    piped.synchronize()


def no_mask(**_: Any) -> None:
    return None


def loss_of(outputs: Any, _: Any) -> torch.Tensor:
    loss: torch.Tensor = outputs.loss
    return loss
