"""The arm of Penstock, with budgets or with a plan made in advance."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from bench.measuring import Batch
from bench.peers.work import InitialWeights, Step, Work
from bench.plain import FP16_SCALE
from penstock.engine.initial_weights import set_weights
from penstock.engine.prepare import prepare
from penstock.machine.presets import preset
from penstock.plan.plan import Plan

BUDGETS = ("hbm", "dram", "nvme")


def arguments_of(work: Work) -> dict[str, Any]:
    """Keyword arguments of `penstock.prepare`."""
    return {
        "context": work.context, "batch": work.batch, "micro_batch": work.micro_batch,
        "dtype": work.dtype, "moments": work.options.get("moments") or "fp32", "clip": work.clip,
        "init": "none", "optimizer": work.adamw,
    }  # fmt: skip


def one_group(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Return a single group: all parameters decay, as in the other arms."""
    return [{"params": [parameter for _, parameter in named]}]


@contextlib.contextmanager
def penstock(work: Work) -> Iterator[Step]:
    options = work.options
    plan = Plan.load(options["plan"]) if options.get("plan") else None
    machine = preset(options["machine"]) if options.get("machine") else None
    budget = {name: options[name] for name in BUDGETS if options.get(name)}
    with tempfile.TemporaryDirectory() as folder:
        config = work.config
        config.save_pretrained(folder)
        engine = prepare(
            folder, budget=None if plan else budget, machine=machine, plan=plan,
            param_groups=one_group, **arguments_of(work),
        )  # fmt: skip
        with engine:
            if work.dtype == "fp16":
                engine.scale.value = FP16_SCALE
            shapes = {t.name: tuple(t.shape) for b in engine.inventory.blocks for t in b.tensors}
            set_weights(engine.access, engine.inventory, InitialWeights(shapes, work))

            def step(batch: Batch) -> float:
                loss = float(engine.step(batch))
                if engine.skipped:
                    print("  overflow: the step was skipped", flush=True)
                return loss

            yield step
            engine.finish()
