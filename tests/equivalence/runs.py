"""Training runs that differ only in things that must not change the result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from penstock.engine.engine import Engine
from penstock.engine.tier_memory import StoreSettings
from penstock.model.inventory import Inventory
from penstock.model.meta_model import weight_dtype
from penstock.plan.plan import Plan
from penstock.plan.workload import Workload
from penstock.roles import STATE, Role
from tests.support import engines

STEPS = 20
FROZEN = ("*.layers.1.mlp.up_proj.weight",)
OPTIMIZER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def warm_up(step: int) -> float:
    """Return the factor of a learning-rate schedule that changes at every step."""
    return min(1.0, (step + 1) / 4) * 0.97**step


@dataclass(frozen=True)
class Setup:
    """A model and a workload: everything that may change the result."""

    config: Any
    model: Inventory
    work: Workload
    source: Any

    @classmethod
    def of(
        cls,
        family: str,
        *,
        freeze: Sequence[str] = FROZEN,
        config: Mapping[str, Any] | None = None,
        **work: Any,
    ) -> Setup:
        """Make a setup; by default a batch is three micro-batches, the last one smaller."""
        model_config = engines.tiny_config(family, **(config or {}))
        work = {"batch": 5, "micro_batch": 2, "clip": 0.5} | work
        workload = engines.workload(**work)
        return cls(
            model_config,
            engines.inventory(model_config, freeze),
            workload,
            engines.plain_model(model_config, weight_dtype(workload.dtype)),
        )

    def batches(self, count: int = STEPS) -> list[Any]:
        return engines.batches(count, self.work, self.config.vocab_size)

    def plan(self, way: Way, disk: Path) -> Plan:
        """Make the plan of a way; `disk` is used only if the way puts something on NVMe."""
        on_disk = any("n" in row for row in way.spots)
        rows = way.rows(len(self.model.blocks))
        path = disk if on_disk else None
        return engines.make_plan_of(self.model, self.work, rows, disk=path, **way.plan)

    def engine(self, way: Way, disk: Path, **settings: Any) -> Engine:
        given: dict[str, Any] = {"optimizer": OPTIMIZER, "sweep_threads": way.threads}
        given["store"] = StoreSettings(**way.store)
        plan = self.plan(way, disk)
        return engines.make_engine(self.config, plan, self.model, self.source, **given | settings)


@dataclass(frozen=True)
class Way:
    """One way to do the work: placement, schedule, store and threads. None may change a bit."""

    name: str
    spots: tuple[str, ...]
    """Tiers of weight, state, gradient and activations; rows are assigned to blocks in turn."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    store: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None

    def rows(self, blocks: int) -> list[str]:
        return [self.spots[i % len(self.spots)] for i in range(blocks)]


RESIDENT = Way("all resident", ("hhhh",))
DRAM = Way("all in DRAM", ("dddd",), threads=1)
DISK = Way("all on disk", ("nnnn",))

WAYS = (
    RESIDENT,
    DRAM,
    Way("split block by block", ("hhhd", "dddh")),
    Way("partly on disk", ("nddd", "dndh", "hhhn", "ddnd", "nndn"), {"piece": 4096}, threads=3),
    DISK,
    Way("all on disk in small pieces, by threads", ("nnnn",), {"piece": 4096},
        {"engine": "threads"}, threads=2),
    Way("inputs on disk", ("dddn",), {"slots": 3}, {"workers": 1}),
    Way("two rounds", ("dddd", "hhhh"), {"rounds": 2}),
    Way("three rounds on disk, far ahead", ("nnnn", "ddnn"),
        {"rounds": 3, "slots": 4, "ahead": 2, "piece": 8192}, {"workers": 4}),
    Way("states on disk, other sweeps between their pieces", ("dndd", "dddd", "dddh"),
        {"piece": 4096, "interleaved": True}, threads=2),
)  # fmt: skip
INTERLEAVED = WAYS[9]
FEW = (RESIDENT, WAYS[3], WAYS[8])
"""A selection for slow tests: nothing streamed, a mix, and everything streamed."""

KEPT = (
    Way("resident, all kept", ("hhhh",), {"kept": (3, 3, 3)}),
    Way("streamed, some kept", ("dddd",), {"kept": (0, 2, 3)}),
    Way("streamed from disk, the first ones kept", ("nnnn", "ddnn"),
        {"kept": (3, 1, 0), "piece": 4096}),
    Way("two rounds, some kept", ("dddd", "hhhh"), {"rounds": 2, "kept": (1, 0, 2), "slots": 3}),
)  # fmt: skip
"""Ways with less to recompute. A round has three micro-batches, or two if there are two rounds."""


ATTENDED = (
    Way("attention's results in HBM", ("dddd", "hhhh"), {"attention": "hhh"}),
    Way("attention's results in DRAM", ("dddd",), {"attention": "ddd"}),
    Way("attention's results in DRAM, activations in HBM", ("dddh",), {"attention": "ddd"}),
    Way("attention's results in both, and kept layers", ("dddd", "hhhh"),
        {"attention": "dhd", "kept": (0, 1, 2)}),
    Way("attention's results of some layers, on disk all else", ("nnnn",),
        {"attention": "d-h", "piece": 4096}),
    Way("two rounds, attention's results", ("dddd", "hhhh"),
        {"rounds": 2, "attention": "dhd", "kept": (0, 0, 1), "slots": 3}),
    Way("attention's results, and sweeps on the GPU", ("dddd",),
        {"attention": "ddd", "gpu_swept": range(5), "gpu_piece": 4096}),
)  # fmt: skip
"""Ways in which layers are recomputed without attention. They need `attention: varlen`."""


HYBRID = (
    Way("swept on the GPU", ("dddd",), {"gpu_swept": range(5), "gpu_piece": 4096}),
    Way("some swept on the GPU, some kept", ("dddd", "hhhh", "dddh"),
        {"gpu_swept": (0, 2, 3), "gpu_piece": 8192, "slots": 3, "kept": (0, 1, 2)}),
    Way("some swept on the GPU, some on disk", ("dddd", "nnnn", "dddn", "ddnn", "dddd"),
        {"gpu_swept": (0, 2, 4), "piece": 4096}, threads=3),
    Way("two rounds, some swept on the GPU", ("dddd",),
        {"gpu_swept": (1, 2), "gpu_piece": 4096, "rounds": 2}),
)  # fmt: skip
"""Ways in which states in DRAM pass through HBM and are swept there."""


LATE = (
    Way("moments updated in backward", ("dddd",), {"late": True}),
    Way("moments updated in backward, activations in HBM", ("dddh",), {"late": True}, threads=2),
    Way("some moments updated in backward", ("dddd", "hhhh", "dddh"),
        {"late": True, "slots": 3, "ahead": 2, "kept": (0, 1, 2)}, threads=1),
    Way("moments in DRAM updated in backward, others on disk", ("dddd", "nnnn", "dndd"),
        {"late": True, "piece": 4096}),
    Way("two rounds, moments updated in backward", ("dddd",), {"late": True, "rounds": 2}),
    Way("moments updated in backward, next to sweeps on the GPU", ("dddd",),
        {"late": True, "gpu_swept": (1, 2), "gpu_piece": 4096}),
    Way("weights swept on the GPU, moments updated in backward", ("dddd",),
        {"late": True, "gpu_swept": range(5), "gpu_piece": 4096}),
    Way("moments on disk updated in backward", ("nnnn",),
        {"late_on_nvme": range(5), "piece": 4096}),
    Way("some moments on disk updated in backward, sweeps in DRAM between pieces",
        ("dndd", "dddd", "nnnd", "dndh"),
        {"late_on_nvme": range(3), "piece": 4096, "interleaved": True}, threads=2),
    Way("three rounds, moments on disk and in DRAM updated in backward", ("dnnn", "dddd", "nndn"),
        {"late_on_nvme": range(5), "late": True, "piece": 8192, "rounds": 3, "slots": 4,
         "ahead": 2}, {"workers": 1}),
)  # fmt: skip
"""Ways in which weights are updated before forward, and moments on the CPU in backward."""


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]
    """Weights, master weights and moments, by tensor and role."""


def train(setup: Setup, way: Way, disk: Path, *, steps: int = STEPS, **settings: Any) -> Result:
    """Train with a learning-rate schedule, as a user would."""
    with setup.engine(way, disk, **settings) as engine:
        losses, norms = follow(engine, setup.batches(steps))
        return Result(losses, norms, state_of(engine))


def follow(engine: Engine, batches: Iterable[Any]) -> tuple[list[float], list[float]]:
    """Train, with one schedule per param group; return losses and gradient norms."""
    factors = [warm_up, lambda step: 0.5 * warm_up(step)]
    scheduler = LambdaLR(engine.optimizer, factors[: len(engine.optimizer.param_groups)])
    losses, norms = [], []
    for batch in batches:
        losses.append(float(engine.step(batch)))
        norms.append(engine.grad_norm)
        scheduler.step()
    return losses, norms


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Return everything that a sweep changes, and the frozen weights."""
    engine.finish()
    state = {}
    trained = [Role.WEIGHT, *filter(engine.access.formats.has, STATE)]
    for block in engine.inventory.blocks:
        for tensor in block.tensors:
            for role in trained if tensor.trainable else (Role.WEIGHT,):
                if engine.access.state_shape(tensor.name, role) == (0,):
                    continue  # Muon has no second moments of matrices
                state[f"{tensor.name} {role}"] = whole(engine, tensor.name, role)
                if engine.access.has_bases and role in (Role.FIRST, Role.SECOND):
                    state[f"{tensor.name} {role} bases"] = whole(engine, tensor.name, role, True)
    return state


def whole(engine: Engine, name: str, role: Role, bases: bool = False) -> torch.Tensor:
    """Return a role of a tensor as one host tensor."""
    return torch.cat([part.clone() for part in engine.access.parts(name, role, bases=bases)])


def differing(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are not equal bit for bit."""
    assert first.keys() == second.keys()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    found = []
    for name, one in first.items():
        other = second[name].view(one.shape)
        same = one.dtype == other.dtype and torch.equal(
            one.contiguous().view(bits[one.element_size()]),
            other.contiguous().view(bits[other.element_size()]),
        )
        if not same:
            found.append(name)
    return found
