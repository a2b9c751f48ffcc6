"""Run the engine's self-check for tiny models, as `prepare` does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from penstock.engine.device import pick_device
from penstock.engine.self_check import self_check
from penstock.model.inventory import Inventory
from penstock.model.meta_model import build_model
from penstock.plan.plan import Plan
from tests.support import engines

KERNELS = {"compiled": True, "attention": "varlen", "loss_kernel": "fused"}
"""Numerics of a run on a GPU."""

TILES = {"mlp_tile": 16, "loss_chunk": 8}
"""Numerics of a run whose micro-batches of 32 tokens have several tiles and chunks."""


def check(family: str, device: str = "cpu", *, config: Any = None, **workload: Any) -> None:
    """Check a model of a family. Keyword arguments override fields of the workload."""
    config = engines.tiny_config(family) if config is None else config
    model, plan = model_and_plan(config, **workload)
    bare = build_model(config, torch.bfloat16, torch.device("cpu"))
    self_check(bare, model, plan, pick_device(device))


def model_and_plan(config: Any, **workload: Any) -> tuple[Inventory, Plan]:
    model = engines.inventory(config)
    work = engines.workload(**workload)
    if work.numerics.attention == "varlen" and not model.plain_attention:
        work = replace(work, numerics=replace(work.numerics, attention="sdpa"))
    return model, engines.make_plan_of(model, work, "dddd")
