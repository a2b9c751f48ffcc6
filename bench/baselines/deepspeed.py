"""DeepSpeed's ZeRO-3 offload and ZeRO-Infinity as plans: their bytes, their order. Room: decide.

Read from DeepSpeed 0.19.8. What sets their steps apart from ours: the optimizer runs after
backward with the GPU idle; the gradient crosses PCIe four times; the CPU makes three passes where
one would do (unscale, Adam, cast to 16 bit), 42 bytes a parameter. Per parameter, in bytes:

| role                     | bytes | touched by                                   |
|--------------------------|-------|----------------------------------------------|
| weight, 16 bit           | 2     | copied in twice; written by the cast         |
| gradient, 16 bit         | 2     | copied out once, back in once (for the norm) |
| master gradient, fp32    | 4     | copied out; unscaled (r, w); read by Adam    |
| master, moments          | 12    | read and written by Adam; master read by cast |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.model.inventory import Inventory
from penstock.plan.placement import Share
from penstock.plan.schedule import Verb
from penstock.plan.workload import Workload
from penstock.planner.cost.compute import token_seconds
from penstock.planner.cost.jobs import Demands
from penstock.planner.cost.rates import Rates
from penstock.planner.cost.simulation import Job, simulate
from penstock.tiers import Tier

CLASSES: dict[str, int] = {
    "momentum": 4,
    "variance": 4,
    "master gradient": 4,
    "master": 4,
    "weight": 2,
    "gradient": 2,
}
"""Bytes a parameter of each class of tensors, which is also the grain of its placement."""

SWEEP_READS = {"momentum": 4, "variance": 4, "master gradient": 8, "master": 8}
SWEEP_WRITES = {"momentum": 4, "variance": 4, "master gradient": 4, "master": 4, "weight": 2}
"""Unscale, Adam and cast: 24 read and 18 written, 42 in all."""

PAGEABLE = 7.3 / 55.3
"""Of PCIe's rate, where host memory is not registered with CUDA (measured)."""

Shares = Mapping[str, Sequence[tuple[int, float]]]
"""Per class, the nodes that hold it and the part on each. `activation` is one more class."""


@dataclass(frozen=True, slots=True)
class ZeroStep:
    """One step of ZeRO-3 with parameters and optimizer on the host."""

    inventory: Inventory
    """The model."""

    workload: Workload
    """What is done."""

    rates: Rates
    """On what."""

    homes: Shares
    """Where each class rests."""

    offload_activations: bool = True
    """Whether block inputs leave the GPU."""

    overlaps: bool = True
    """Whether copies run beside compute. Before mid-2026 gradients left by blocking copies and
    every fetch ended in a host-side wait, so nothing did."""

    gpus: int = 1
    """GPUs that share the host."""

    def seconds(self) -> float:
        return max(span.end for span in simulate(self.jobs()))

    def jobs(self) -> list[Job]:
        """Forward and backward with one bucket ahead, then Adam alone."""
        jobs: list[Job] = []
        computed: int | None = None
        for backward in (False, True):
            blocks = list(self.inventory.blocks)
            for block in reversed(blocks) if backward else blocks:
                elements = block.parameters() or sum(
                    t.elements for b in blocks for t in b.tensors if t.name in block.borrows
                )
                fetch = Demands(self.rates, self.gpus)
                fetch.copy_in(self._shares("weight", 2 * elements))
                if backward and block.kind == "layer" and self.offload_activations:
                    fetch.copy_in(self._shares("activation", self._input()))
                jobs.append(Job("fetch", fetch.total(), _after(computed, len(jobs))))
                verb = Verb.BACKWARD if backward else Verb.FORWARD
                each = token_seconds(self.inventory, block, self.workload.context, verb, self.rates)
                computed = len(jobs)
                gpu = {"gpu": max(self.workload.tokens * each, 1e-9)}
                jobs.append(Job("compute", gpu, (computed - 1,)))
                jobs.append(Job("drain", self._drain(backward, elements, block.kind), (computed,)))
        jobs.append(Job("sweep", self._adam(), tuple(range(len(jobs)))))
        return jobs if self.overlaps else [Job("one", job.demands, ()) for job in jobs]

    def _drain(self, backward: bool, elements: int, kind: str) -> dict[str, float]:
        out = Demands(self.rates, self.gpus)
        if backward:
            out.copy_out(self._shares("gradient", 2 * elements))
            out.copy_in(self._shares("gradient", 2 * elements))
            out.copy_out(self._shares("master gradient", 4 * elements))
        elif kind == "layer" and self.offload_activations:
            out.copy_out(self._shares("activation", self._input()))
        return out.total()

    def _adam(self) -> dict[str, float]:
        total = Demands(self.rates)
        parameters = self.inventory.parameters()
        for name in CLASSES:
            for share in self._shares(name, parameters):
                reads = SWEEP_READS.get(name, 0) * share.nbytes
                writes = SWEEP_WRITES.get(name, 0) * share.nbytes
                total.sweep(share, read=reads, write=writes)
        return total.total()

    def _input(self) -> int:
        return self.workload.tokens * self.inventory.hidden * 2

    def _shares(self, name: str, nbytes: int) -> list[Share]:
        return [
            Share(tier=Tier.DRAM, nbytes=round(nbytes * part), node=node)
            for node, part in self.homes[name]
        ]


def all_on(node: int) -> Shares:
    """Everything in one place."""
    return dict.fromkeys((*CLASSES, "activation"), ((node, 1.0),))


def interleaved(nodes: Sequence[int]) -> Shares:
    """Pages dealt to every node in turn, as `numactl --interleave` does."""
    return {name: [(n, 1 / len(nodes)) for n in nodes] for name in (*CLASSES, "activation")}


def zero_infinity_seconds(
    inventory: Inventory, workload: Workload, rates: Rates, path: str
) -> float:
    """ZeRO-Infinity: the same with all of it on disk, through memory that CUDA does not know.

    Reads 20 bytes a parameter (weights twice; master, moments and gradient for Adam) and writes 18
    (gradient, then master, moments and weight). The disk's two directions share it, so its
    pipeline of reads and writes ends no sooner than their sum; copies block the host.
    """
    parameters = inventory.parameters()
    disk = 20 * parameters / rates.disks[path].read + 18 * parameters / rates.disks[path].write
    copies = (2 + 2 + 2) * parameters / (PAGEABLE * rates.h2d)
    copies += (2 + 4) * parameters / (PAGEABLE * rates.d2h)
    compute = sum(
        token_seconds(inventory, block, workload.context, verb, rates) * workload.tokens
        for block in inventory.blocks
        for verb in (Verb.FORWARD, Verb.BACKWARD)
    )
    adam = 42 * parameters / rates.nodes[rates.staging_node].sweep
    return disk + copies + compute + adam


def _after(computed: int | None, here: int) -> tuple[int, ...]:
    """A fetch runs one block ahead: it waits for the computation before the last."""
    return () if computed is None or here < 4 else (computed - 3,)
