"""The arms of torch: everything in HBM, and FSDP2 with CPU offload."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import torch

from bench.measuring import Batch
from bench.peers.work import Step, Work, build_model
from bench.plain import liger_loss, plain_step


@contextlib.contextmanager
def plain(work: Work) -> Iterator[Step]:
    """Train with everything in HBM: the baseline."""
    model = build_model(work, work.torch_dtype, work.device)
    yield plain_step(model, adamw=work.adamw, clip=work.clip, micro_batch=work.micro_batch)


@contextlib.contextmanager
def plain_liger(work: Work) -> Iterator[Step]:
    """Train with everything in HBM, compiled layers and Liger's loss, with checkpointing."""
    with _compiled(work, checkpointing=True) as step:
        yield step


@contextlib.contextmanager
def plain_liger_stored(work: Work) -> Iterator[Step]:
    """The same without checkpointing: all activations are stored, and nothing is recomputed."""
    with _compiled(work, checkpointing=False) as step:
        yield step


@contextlib.contextmanager
def _compiled(work: Work, *, checkpointing: bool) -> Iterator[Step]:
    model = build_model(work, work.torch_dtype, work.device)
    if not checkpointing:
        model.gradient_checkpointing_disable()
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    yield plain_step(
        model, adamw=work.adamw, clip=work.clip, micro_batch=work.micro_batch, loss_of=liger_loss
    )


@contextlib.contextmanager
def fsdp2(work: Work) -> Iterator[Step]:
    """Train with FSDP2: fp32 shards on the CPU, 16-bit compute, torch's fused CPU AdamW."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if work.dtype == "fp16":
        raise ValueError("the fsdp2 arm supports bf16 only: it has no loss scale")
    model = build_model(work, torch.float32, torch.device("cpu"))
    with one_rank("cpu:gloo,cuda:nccl" if work.device.type == "cuda" else "gloo"):
        mesh = init_device_mesh(work.device.type, (1,))
        settings: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=work.torch_dtype, reduce_dtype=torch.float32
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=work.device.type == "cuda"),
        }
        for layer in model.model.layers:
            fully_shard(layer, **settings)
        fully_shard(model, **settings)
        model.model.rotary_emb.to(work.device)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, fused=True, **work.adamw)

        def step(batch: Batch) -> float:
            ids = batch["input_ids"].to(work.device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, work.clip)
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())

        yield step


@contextlib.contextmanager
def one_rank(backend: str) -> Iterator[None]:
    """Initialize torch.distributed with a single process."""
    set_one_rank()
    torch.distributed.init_process_group(backend)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def set_one_rank() -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ[name] = value
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ.setdefault("MASTER_PORT", str(free.getsockname()[1]))
