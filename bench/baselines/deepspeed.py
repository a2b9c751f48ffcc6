"""Simulate a step of DeepSpeed's ZeRO-3 offload and of ZeRO-Infinity.

Bytes and order are those of DeepSpeed 0.19.8. A step differs from Penstock's in three ways: the
optimizer runs after backward, while the GPU is idle; the gradient crosses PCIe four times; and the
CPU makes three passes (unscale, Adam, cast to 16 bits) that move 42 bytes per parameter, where one
pass is enough. Bytes per parameter:

| role                     | bytes | touched by                                   |
|--------------------------|-------|----------------------------------------------|
| weight, 16 bit           | 2     | copied in twice; written by the cast         |
| gradient, 16 bit         | 2     | copied out once, back in once (for the norm) |
| master gradient, fp32    | 4     | copied out; unscaled (r, w); read by Adam    |
| master, moments          | 12    | read and written by Adam; master read by cast |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.model.inventory import Inventory
from penstock.plan.placement import Share
from penstock.plan.schedule import Verb
from penstock.plan.seats import Ranks
from penstock.plan.workload import Workload
from penstock.planner.cost.compute import token_seconds
from penstock.planner.cost.demands import Demands
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
"""Bytes per parameter of each class of tensors. A class is placed as a whole."""

SWEEP_READS = {"momentum": 4, "variance": 4, "master gradient": 8, "master": 8}
SWEEP_WRITES = {"momentum": 4, "variance": 4, "master gradient": 4, "master": 4, "weight": 2}
"""Bytes per parameter that unscale, Adam and cast read (24) and write (18)."""

PAGEABLE = 7.3 / 55.3
"""Measured fraction of PCIe's bandwidth for host memory that is not registered with CUDA."""

Shares = Mapping[str, Sequence[tuple[int, float]]]
"""For each class, the nodes that hold it and the fraction on each. `activation` is a class too."""


@dataclass(frozen=True, slots=True)
class ZeroStep:
    """One step of ZeRO-3 with parameters and optimizer on the host."""

    inventory: Inventory
    """The model."""

    workload: Workload
    """The workload of the step."""

    rates: Rates
    """Bandwidths of the machine."""

    homes: Shares
    """The nodes that hold each class."""

    offload_activations: bool = True
    """Whether activations (block inputs) are offloaded."""

    overlaps: bool = True
    """Whether copies overlap with compute. Before mid-2026 gradients were offloaded by blocking
    copies and every fetch ended in a host-side wait, so they did not."""

    gpus: int = 1
    """Number of GPUs that share the host."""

    def seconds(self) -> float:
        return max(span.end for span in simulate(self.jobs()))

    def jobs(self) -> list[Job]:
        """Return the jobs of a step: forward and backward with one block of prefetch, then Adam."""
        jobs: list[Job] = []
        computed: int | None = None
        for backward in (False, True):
            blocks = list(self.inventory.blocks)
            for block in reversed(blocks) if backward else blocks:
                elements = block.parameters() or sum(
                    t.elements for b in blocks for t in b.tensors if t.name in block.borrows
                )
                fetch = Demands(self.rates, Ranks(world=self.gpus))
                self._copy(fetch.copy_in, "weight", 2 * elements)
                if backward and block.kind == "layer" and self.offload_activations:
                    self._copy(fetch.copy_in, "activation", self._input_nbytes())
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
        out = Demands(self.rates, Ranks(world=self.gpus))
        if backward:
            self._copy(out.copy_out, "gradient", 2 * elements)
            self._copy(out.copy_in, "gradient", 2 * elements)
            self._copy(out.copy_out, "master gradient", 4 * elements)
        elif kind == "layer" and self.offload_activations:
            self._copy(out.copy_out, "activation", self._input_nbytes())
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

    def _copy(self, copy: Callable[[Share, float], None], name: str, nbytes: int) -> None:
        for share in self._shares(name, nbytes):
            copy(share, share.nbytes)

    def _input_nbytes(self) -> int:
        return self.workload.tokens * self.inventory.hidden * 2

    def _shares(self, name: str, nbytes: int) -> list[Share]:
        return [
            Share(tier=Tier.DRAM, nbytes=round(nbytes * part), node=node)
            for node, part in self.homes[name]
        ]


def all_on(node: int) -> Shares:
    """Place every class on one node."""
    return dict.fromkeys((*CLASSES, "activation"), ((node, 1.0),))


def interleaved(nodes: Sequence[int]) -> Shares:
    """Interleave the pages of every class over the nodes, like `numactl --interleave`."""
    return {name: [(n, 1 / len(nodes)) for n in nodes] for name in (*CLASSES, "activation")}


def zero_infinity_seconds(
    inventory: Inventory, workload: Workload, rates: Rates, path: str
) -> float:
    """Return the seconds of a ZeRO-Infinity step: everything on disk, copied from pageable memory.

    It reads 20 bytes per parameter (weights twice; master weights, moments and gradient for Adam)
    and writes 18 (the gradient, then master weights, moments and weights). Reads and writes share
    the disk, so pipelining them cannot take less than their sum. Copies block the host.
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
    """Return the jobs that a fetch waits for: it runs one block ahead of the computation."""
    return () if computed is None or here < 4 else (computed - 3,)
