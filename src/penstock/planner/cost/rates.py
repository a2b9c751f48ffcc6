"""The speeds a step depends on, read off a machine, and what had to be assumed. Room: decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import MachineError
from penstock.machine.machine import Gpu, Machine, MemoryNode, StoragePath
from penstock.machine.presets import BLOCK_SHARE, COMPILED_GAIN, MATMUL_SHARE, data_sheet
from penstock.planner.cost.flops import ATTENTION_BACKWARD
from penstock.roles import Moments

SWEEP_SHARE = 0.91
"""A sweep's bytes per second against a copy's, reads and writes: 118 of 129 GB/s (measured)."""

BOTH_WAYS = 0.915
"""Of the two directions' sum, when a link runs both at once: 101.1 of 110.5 GB/s (measured)."""

LANE_RATE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second of one PCIe lane, by generation, before packets' own overhead."""

PACKET_SHARE = 0.877
"""What remains of it for copies: 55.3 of 63.0 GB/s (measured)."""

CORE_COPY = 4e9
"""Bytes per second that each core copies in a node nobody measured, all of them at work."""

MOST_COPIED = {"dram": 50e9, "cxl": 10e9}
"""However many cores: a few channels of DDR4, and a CXL card of one x8 link. Low rather than high,
and enough to plan by; a probe replaces it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRates:
    """One memory node, in bytes per second."""

    read: float
    """By everyone together."""

    write: float
    """By everyone together. CXL writes slower than it reads."""

    total: float
    """Reads and writes together."""

    sweep: float
    """Every byte that a sweep of the workload's format reads or writes."""

    to_gpu: float
    """One GPU's copies from it."""

    from_gpu: float
    """One GPU's copies to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskRates:
    """One path, in bytes per second."""

    read: float
    """Nothing else going on."""

    write: float
    """Nothing else going on."""

    both: float | None
    """Reads and writes at the same time, together. None: nobody measured it, and they take turns,
    as drives did where it was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """All of them, for the first GPU of a machine."""

    block_flops: float
    """Operations per second in products with weights."""

    attention_flops: float
    """Operations per second in attention's quadratic part."""

    passes: float
    """How often a layer's computation, forward and backward, goes through what is as wide as it
    for all else: norms, activations, sums. At the rate of the GPU's own memory."""

    hbm: float
    """Bytes per second of the GPU's own memory."""

    h2d: float
    """Bytes per second into the GPU from the best node."""

    d2h: float
    """Bytes per second out of the GPU to the best node."""

    both: float
    """Bytes per second in both directions at once, summed."""

    nodes: Mapping[int, NodeRates]
    """By node."""

    disks: Mapping[str, DiskRates]
    """By path."""

    launched: bool
    """Whether what computes is launched by the host, operation by operation: a GPU."""

    staging_node: int
    """Where host buffers are: the DRAM node nearest to the GPU."""

    assumed: tuple[str, ...] = ()
    """What the machine file did not say."""

    @classmethod
    def of(cls, machine: Machine, moments: Moments = "fp32", *, compiled: bool = False) -> Rates:
        """Raises MachineError naming the field without which nothing can be said.

        A sweep's rate depends on how the moments rest, a layer's on whether it is `compiled`.
        """
        assumed: list[str] = []
        gpu = machine.gpus[0] if machine.gpus else None
        layer, attention, passes, hbm = _gpu_rates(machine, gpu, compiled, assumed)
        links = _links(machine, gpu, assumed)
        nodes = {
            node.id: _node_rates(machine, i, moments, links, assumed)
            for i, node in enumerate(machine.nodes)
        }
        h2d = max(node.to_gpu for node in nodes.values())
        d2h = max(node.from_gpu for node in nodes.values())
        both = _transfer(machine, "both", None)
        dram = [node.id for node in machine.dram_nodes]
        near = gpu.node if gpu is not None and gpu.node in dram else dram[0]
        return cls(
            block_flops=layer,
            attention_flops=attention,
            passes=passes,
            hbm=hbm,
            h2d=h2d,
            d2h=d2h,
            both=both or BOTH_WAYS * (h2d + d2h),
            nodes=nodes,
            disks={s.path: _disk(i, s) for i, s in enumerate(machine.storage)},
            launched=gpu is not None,
            staging_node=near if near is not None else dram[0],
            assumed=tuple(assumed),
        )


CPU_FLOPS_PER_CORE = 20e9
"""A processor in the GPU's place: layers in bf16, forward and backward, ran at 18 (256 wide) to 28
(1,024 wide) GFLOP/s on one core of a 2.8 GHz Xeon. Only the order of magnitude counts."""

CPU_PASSES, CPU_PASSED = 1200.0, 20e9
"""The same for all that is not products: hundreds of small operations, of which each wakes threads
and waits for them. They are half the step of a model that is 192 wide, and little of wide ones."""


LAYER_DENSE = 4 * 2.0 * 218_103_808
LAYER_QUADRATIC = (2 + ATTENTION_BACKWARD) * 4.0 * 4096 * 4096 / 2
LAYER_NBYTES = 2 * (2 * 4096 + 14336)
"""Operations for a token and its `width_nbytes` in the layer that `block_flops` and
`compiled_flops` are measured with: an 8B model's, at 4,096 tokens of context."""


def _gpu_rates(
    machine: Machine, gpu: Gpu | None, compiled: bool, assumed: list[str]
) -> tuple[float, float, float, float]:
    """Of products, of attention, passes, and of the GPU's own memory.

    A layer's rate is known for one width. Its products run at the rate of large ones; what is left
    of its time grows with the width only, and is most of what narrow models lose.
    """
    if gpu is None:
        cores = machine.cpu.cores or len(machine.dram_nodes[0].cpus) or 1
        assumed.append(f"no GPU: {cores} cores compute at {CPU_FLOPS_PER_CORE / 1e9:.0f} GFLOP/s")
        flops = cores * CPU_FLOPS_PER_CORE
        return flops, flops, CPU_PASSES, CPU_PASSED
    whole = _layer_flops(gpu, compiled, assumed)
    sheet = data_sheet(gpu.name)
    own = gpu.memory_bandwidth.median if gpu.memory_bandwidth else sheet[1] if sheet else 0.5e12
    attention = gpu.attention_flops.median if gpu.attention_flops else whole
    left = (LAYER_DENSE + LAYER_QUADRATIC) / whole - LAYER_QUADRATIC / attention
    products = max(gpu.matmul_flops.median if gpu.matmul_flops else 0.0, LAYER_DENSE / left)
    passes = (left - LAYER_DENSE / products) * own / LAYER_NBYTES
    return products, attention, passes, own


def _layer_flops(gpu: Gpu, compiled: bool, assumed: list[str]) -> float:
    """In a whole layer."""
    if compiled and gpu.compiled_flops is not None:
        return gpu.compiled_flops.median
    flops = _eager_flops(gpu, assumed)
    if not compiled:
        return flops
    assumed.append(f"{gpu.name}: compiled layers at {COMPILED_GAIN:.2f} times the others' rate")
    return COMPILED_GAIN * flops


def _eager_flops(gpu: Gpu, assumed: list[str]) -> float:
    sheet = data_sheet(gpu.name)
    matmul = gpu.matmul_flops.median if gpu.matmul_flops else None
    if matmul is None and gpu.block_flops is None:
        if sheet is None:
            raise MachineError(
                "gpus[0].matmul_flops",
                f'is missing, and "{gpu.name}" is not a GPU whose data sheet is known; '
                f"`penstock probe` measures it, or give its 16-bit matrix rate in FLOP/s",
            )
        matmul = MATMUL_SHARE * sheet[0]
        assumed.append(f"{gpu.name}: {matmul / 1e12:.0f} TFLOP/s from its data sheet")
    return gpu.block_flops.median if gpu.block_flops else BLOCK_SHARE * (matmul or 0.0)


def _links(machine: Machine, gpu: Gpu | None, assumed: list[str]) -> float:
    """What a node gives a GPU where no transfer was measured."""
    if gpu is None:
        return 20e9
    if gpu.pcie_generation is not None and gpu.pcie_width is not None:
        lane = LANE_RATE.get(gpu.pcie_generation, LANE_RATE[6])
        rate = PACKET_SHARE * lane * gpu.pcie_width
        if not machine.transfers:
            assumed.append(f"PCIe at {rate / 1e9:.0f} GB/s each way, from generation and width")
        return rate
    if not machine.transfers:
        raise MachineError(
            "transfers",
            "is missing, and gpus[0] has no pcie_generation and pcie_width to stand in for it; "
            "`penstock probe` measures it",
        )
    return 0.0


def _node_rates(
    machine: Machine, i: int, moments: Moments, link: float, assumed: list[str]
) -> NodeRates:
    node = machine.nodes[i]
    figures = [machine.rate(node.id, operation) for operation in ("read", "write", "copy")]
    figures += [machine.sweep_rate(node.id, of) for of in (moments, "fp32")]
    read, write, copy, sweep, exact = (figure.median if figure else None for figure in figures)
    claims = node.firmware
    read = read or (claims.read_bandwidth if claims else None)
    write = write or (claims.write_bandwidth if claims else None)
    seen = (2 * copy if copy else None, read, write, sweep, exact)
    total = max((r for r in seen if r), default=None)
    if total is None:
        copy = _assumed_copy(machine, node, assumed)
        total = 2 * copy
    if sweep is None:
        sweep = SWEEP_SHARE * (2 * copy if copy else total)
        assumed.append(f"node {node.id}: a sweep at {sweep / 1e9:.0f} GB/s, from its copy rate")
    to_gpu = _transfer(machine, "h2d", node.id)
    from_gpu = _transfer(machine, "d2h", node.id)
    return NodeRates(
        read=max(read or total, _transfer(machine, "h2d", node.id, all_gpus=True) or 0.0),
        write=max(write or total, _transfer(machine, "d2h", node.id, all_gpus=True) or 0.0),
        total=total,
        sweep=sweep,
        to_gpu=to_gpu or link or total,
        from_gpu=from_gpu or link or total,
    )


def _transfer(
    machine: Machine, direction: str, node: int | None, *, all_gpus: bool = False
) -> float | None:
    rates = [
        t.bytes_per_second.median
        for t in machine.transfers
        if t.direction == direction
        and node in (None, t.node)
        and (all_gpus or len(t.gpus) == 1)
    ]  # fmt: skip
    return max(rates, default=None)


def _disk(i: int, storage: StoragePath) -> DiskRates:
    best: dict[str, float] = {}
    for rate in storage.rates:
        best[rate.operation] = max(best.get(rate.operation, 0.0), rate.bytes_per_second.median)
    for operation in ("read", "write"):
        if operation not in best:
            raise MachineError(f"storage[{i}].rates", f"must have a {operation} rate, got none")
    return DiskRates(read=best["read"], write=best["write"], both=best.get("both"))


def _assumed_copy(machine: Machine, node: MemoryNode, assumed: list[str]) -> float:
    cores = machine.cpu.cores or sum(len(each.cpus) for each in machine.dram_nodes) or 1
    copy = min(cores * CORE_COPY, MOST_COPIED[node.kind])
    assumed.append(f"node {node.id}: copies at {copy / 1e9:.0f} GB/s; `penstock probe` measures it")
    return copy
