"""Read the speeds that a step depends on from a machine file, and record what was assumed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.errors import MachineError
from penstock.machine.machine import Gpu, Machine, MemoryNode, StoragePath
from penstock.machine.presets import BLOCK_SHARE, COMPILED_GAIN, MATMUL_SHARE, data_sheet
from penstock.plan.seats import ALONE, Ranks
from penstock.plan.staging import choose_staging_node
from penstock.planner.cost.flops import ATTENTION_BACKWARD
from penstock.roles import WEIGHT_FORMATS, Dtype, Moments

SWEEP_SHARE = 0.91
"""Bytes per second of an optimizer sweep relative to a copy, counting reads and writes. Measured:
118 of 129 GB/s."""

SHARED_READS = 0.75
SHARED_WRITES = 12 / 26
"""What memory reads, and what it writes, relative to a sweep and copies in both directions
together. Measured: 118 to 145 GB/s of reads where these move 175 to 190 GB/s. Cores alone reach
less than that. Of a sweep with fp32 moments, 12 of 26 bytes are writes."""

LONG_SWEEP = 64_000_000
"""Parameters from which a sweep is certain to use memory: the state of 16 million fits into the
last-level cache of a large server, where a sweep was measured at 243 GB/s instead of 162."""

BOTH_WAYS = 0.915
"""Bytes per second of a PCIe link that runs in both directions, relative to the sum of the two
directions alone. Measured: 101.1 of 110.5 GB/s."""

LANE_RATE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second of one PCIe lane, by generation, including packet overhead."""

PACKET_SHARE = 0.877
"""Fraction of a PCIe link's rate that copies reach. Measured: 55.3 of 63.0 GB/s."""

CORE_COPY = 4e9
"""Bytes per second that each core copies when all cores copy, assumed for an unmeasured node."""

MOST_COPIED = {"dram": 50e9, "cxl": 10e9}
"""Maximum bytes per second assumed for copies on an unmeasured node: a few channels of DDR4, and a
CXL card with one x8 link. These are low on purpose. A probe replaces them."""

CPU_FLOPS_PER_CORE = 20e9
"""FLOP/s of one core on a machine without a GPU. One core of a 2.8 GHz Xeon ran forward and
backward of bf16 layers at 18 GFLOP/s (hidden size 256) to 28 GFLOP/s (1,024). Only the order of
magnitude matters."""

CPU_PASSES, CPU_MEMORY_RATE = 1200.0, 20e9
"""`Rates.passes` and `Rates.hbm` on a machine without a GPU. A layer runs hundreds of small
operations, each of which wakes threads and waits for them. They are half the step of a model with
hidden size 192, and a small part of a wide one's."""

NVLINK_RATE = 50e9
"""Bytes per second each way of an NVLink that was not measured: a bridge between two cards. That
is low on purpose: links of servers are several times as fast."""

NIC_SHARE = 0.5
"""Network cards that are at least this fast, relative to the fastest one, are used together."""

NIC_LATENCY = 20e-6
"""Seconds until a small message arrives at another machine, assumed for unmeasured cards."""

FP32_SHARE = 1 / 16
"""FLOP/s in fp32 relative to 16-bit tensor operations, for a GPU without a data sheet: the lowest
share of common GPUs is about this."""

LAYER_DENSE = 4 * 2.0 * 218_103_808
LAYER_QUADRATIC = (2 + ATTENTION_BACKWARD) * 4.0 * 4096 * 4096 / 2
LAYER_NBYTES = 2 * (2 * 4096 + 14336)
"""Operations per token, and bytes of `layer_width` 16-bit values, of the layer that `block_flops`
and `compiled_flops` are measured with: that of an 8B model at a context of 4,096 tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRates:
    """Speeds of one memory node, in bytes per second."""

    read: float
    """Reads by all readers together."""

    write: float
    """Writes by all writers together. CXL memory is slower to write than to read."""

    total: float
    """Reads and writes together."""

    sweep: float
    """Bytes that an optimizer sweep reads and writes, with the workload's moments."""

    to_gpu: float
    """Copies from the node to one GPU."""

    from_gpu: float
    """Copies from one GPU to the node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskRates:
    """Speeds of one directory or device, in bytes per second."""

    read: float
    """Reads without concurrent writes."""

    write: float
    """Writes without concurrent reads."""

    both: float | None
    """Concurrent reads and writes together. If None, it was not measured, and reads and writes
    are assumed to take turns, as measured drives do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """All speeds that a step depends on, for the first GPU of a machine."""

    block_flops: float
    """FLOP/s of matrix products with weights."""

    attention_flops: float
    """FLOP/s of the quadratic part of attention."""

    passes: float
    """How many times forward and backward of a layer pass over `layer_width` values per token for
    everything but matrix products: norms, activation functions, sums. They run at the rate of the
    GPU's memory."""

    element: int = 2
    """Bytes of one value that the GPU computes with."""

    hbm: float
    """Bytes per second of the GPU's memory."""

    h2d: float
    """Bytes per second into the GPU from the fastest node."""

    d2h: float
    """Bytes per second out of the GPU to the fastest node."""

    both: float
    """Bytes per second of concurrent copies in both directions, summed."""

    nodes: Mapping[int, NodeRates]
    """Speeds of each memory node."""

    disks: Mapping[str, DiskRates]
    """Speeds of each directory or device."""

    peer: float | None = None
    """Bytes per second that each GPU of a machine sends to the others while it receives as much;
    None if they reach each other through host memory only."""

    peer_has_own_link: bool = False
    """Whether GPUs reach each other over links of their own, and not over PCIe."""

    sockets: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Bytes per second from one DRAM node to another, by their numbers, as far as measured."""

    nic: float | None = None
    """Bytes per second of a machine's network cards together, each way; None for one machine."""

    nic_latency: float = 0.0
    """Seconds until a small message arrives at another machine."""

    nic_direct: bool = False
    """Whether network cards read and write GPU memory without a copy in host memory."""

    launched: bool
    """Whether the host launches compute kernel by kernel, as it does on a GPU."""

    staging_node: int
    """The node of host staging in a plan for the machine (`plan.staging`)."""

    assumed: tuple[str, ...] = ()
    """Assumptions about what the machine file does not state."""

    @classmethod
    def of(
        cls, machine: Machine, moments: Moments = "fp32", *, dtype: Dtype = "bf16",
        compiled: bool = False, ranks: Ranks = ALONE,
    ) -> Rates:  # fmt: skip
        """Read the speeds of a machine.

        The rate of an optimizer sweep depends on the format of the moments, and the rate of a layer
        on its data type and on whether it is compiled. `ranks` says which GPUs compute; by default,
        the first one. Raises MachineError naming a required field
        that is missing.
        """
        assumed: list[str] = []
        gpu = machine.gpus[0] if machine.gpus else None
        layer, attention, passes, hbm = _gpu_rates(machine, gpu, compiled, assumed)
        if gpu is not None and dtype == "fp32":
            fp32 = _fp32_flops(gpu, layer, assumed)
            layer, attention = min(layer, fp32), min(attention, fp32)
        link = _assumed_link_rate(machine, gpu, assumed)
        nodes = {
            node.id: _node_rates(machine, i, moments, link, ranks, assumed)
            for i, node in enumerate(machine.nodes)
        }
        h2d = max(node.to_gpu for node in nodes.values())
        d2h = max(node.from_gpu for node in nodes.values())
        both = _transfer(machine, "both", None)
        peer, peer_has_own_link = _peer_rate(machine, ranks, min(h2d, d2h), assumed)
        nic, nic_latency, nic_direct = _nic_rates(machine, ranks, assumed)
        return cls(
            block_flops=layer,
            attention_flops=attention,
            passes=passes,
            element=WEIGHT_FORMATS[dtype].weight,
            hbm=hbm,
            h2d=h2d,
            d2h=d2h,
            both=both or BOTH_WAYS * (h2d + d2h),
            nodes=nodes,
            disks={s.path: _disk(i, s) for i, s in enumerate(machine.storage)},
            peer=peer,
            peer_has_own_link=peer_has_own_link,
            sockets=_socket_rates(machine, ranks, assumed),
            nic=nic,
            nic_latency=nic_latency,
            nic_direct=nic_direct,
            launched=gpu is not None,
            staging_node=choose_staging_node(machine),
            assumed=tuple(assumed),
        )


def _gpu_rates(
    machine: Machine, gpu: Gpu | None, compiled: bool, assumed: list[str]
) -> tuple[float, float, float, float]:
    """Return `block_flops`, `attention_flops`, `passes` and `hbm`.

    The rate of a whole layer is measured for one width only. Its matrix products run at the rate
    of large ones. The rest of its time is proportional to the width, not to its square, which is
    why narrow models reach fewer FLOP/s.
    """
    if gpu is None:
        cores = machine.cpu.cores or len(machine.dram_nodes[0].cpus) or 1
        assumed.append(
            f"no GPU: {cores} cores compute at {CPU_FLOPS_PER_CORE / 1e9:.0f} GFLOP/s each"
        )
        flops = cores * CPU_FLOPS_PER_CORE
        return flops, flops, CPU_PASSES, CPU_MEMORY_RATE
    whole = _layer_flops(gpu, compiled, assumed)
    sheet = data_sheet(gpu.name)
    hbm = (
        gpu.memory_bandwidth.median
        if gpu.memory_bandwidth
        else sheet.bandwidth
        if sheet
        else 0.5e12
    )
    attention = gpu.attention_flops.median if gpu.attention_flops else whole
    # Seconds per token of the measured layer without attention: matrix products and passes.
    left = (LAYER_DENSE + LAYER_QUADRATIC) / whole - LAYER_QUADRATIC / attention
    matmul = MATMUL_SHARE * sheet.flops if sheet else 0.0
    if gpu.matmul_flops:
        matmul = gpu.matmul_flops.median
    products = max(matmul, LAYER_DENSE / left)
    passes = (left - LAYER_DENSE / products) * hbm / LAYER_NBYTES
    return products, attention, passes, hbm


def _layer_flops(gpu: Gpu, compiled: bool, assumed: list[str]) -> float:
    """Return the FLOP/s of a whole layer."""
    if compiled and gpu.compiled_flops is not None:
        return gpu.compiled_flops.median
    flops = _eager_flops(gpu, assumed)
    if not compiled:
        return flops
    assumed.append(
        f"{gpu.name}: compiled layers run {COMPILED_GAIN:.2f} times as fast as eager ones"
    )
    return COMPILED_GAIN * flops


def _eager_flops(gpu: Gpu, assumed: list[str]) -> float:
    """Return the FLOP/s of a whole eager layer, measured or from the data sheet."""
    sheet = data_sheet(gpu.name)
    matmul = gpu.matmul_flops.median if gpu.matmul_flops else None
    if matmul is None and gpu.block_flops is None:
        if sheet is None:
            raise MachineError(
                "gpus[0].matmul_flops",
                f'is missing, and Penstock has no data sheet for "{gpu.name}"; '
                f"measure it with `penstock probe`, or set its 16-bit matrix rate in FLOP/s",
            )
        matmul = MATMUL_SHARE * sheet.flops
        assumed.append(f"{gpu.name}: {matmul / 1e12:.0f} TFLOP/s, from its data sheet")
    return gpu.block_flops.median if gpu.block_flops else BLOCK_SHARE * (matmul or 0.0)


def _fp32_flops(gpu: Gpu, flops: float, assumed: list[str]) -> float:
    """Return the FLOP/s of fp32 matrix products, which use no tensor cores.

    Machine files have 16-bit rates only, because fp32 is for checking results.
    """
    sheet = data_sheet(gpu.name)
    fp32 = MATMUL_SHARE * sheet.fp32_flops if sheet else FP32_SHARE * flops
    assumed.append(f"{gpu.name}: {fp32 / 1e12:.0f} TFLOP/s in fp32, not measured")
    return fp32


def _assumed_link_rate(machine: Machine, gpu: Gpu | None, assumed: list[str]) -> float:
    """Return the bytes per second between a node and the GPU, for unmeasured transfers."""
    if gpu is None:
        return 20e9
    if gpu.pcie_generation is not None and gpu.pcie_width is not None:
        lane = LANE_RATE.get(gpu.pcie_generation, LANE_RATE[6])
        rate = PACKET_SHARE * lane * gpu.pcie_width
        if not machine.transfers:
            assumed.append(f"PCIe: {rate / 1e9:.0f} GB/s each way, from its generation and width")
        return rate
    if not machine.transfers:
        raise MachineError(
            "transfers",
            "is missing, and gpus[0] has no pcie_generation and pcie_width to derive it from; "
            "measure it with `penstock probe`",
        )
    return 0.0


def _peer_rate(
    machine: Machine, ranks: Ranks, pcie: float, assumed: list[str]
) -> tuple[float | None, bool]:
    """Return `peer` and `peer_has_own_link`; `pcie` is the rate of copies from the host."""
    gpus = [gpu.index for gpu in machine.gpus[: ranks.local]]
    if len(gpus) < 2:
        return None, False
    link = machine.gpu_link(gpus)
    if link is None:
        assumed.append("GPUs reach each other through host memory only")
    if link is None or link.kind == "none":
        return None, False
    if link.bytes_per_second is not None:
        return link.bytes_per_second.median, link.kind == "nvlink"
    rate = NVLINK_RATE if link.kind == "nvlink" else pcie
    assumed.append(f"GPU links: {rate / 1e9:.0f} GB/s each way; `penstock probe` measures them")
    return rate, link.kind == "nvlink"


def _socket_rates(
    machine: Machine, ranks: Ranks, assumed: list[str]
) -> dict[tuple[int, int], float]:
    dram = {node.id for node in machine.dram_nodes}
    used = {seat.nodes[0] for seat in ranks.seats}
    best: dict[tuple[int, int], float] = {}
    for copy in machine.node_copies:
        if {copy.source, copy.target} <= dram:
            key = (copy.source, copy.target)
            best[key] = max(best.get(key, 0.0), copy.bytes_per_second.median)
    if len(used) > 1 and not best:
        assumed.append("links between sockets are no limit; `penstock probe` measures them")
    return best


def _nic_rates(
    machine: Machine, ranks: Ranks, assumed: list[str]
) -> tuple[float | None, float, bool]:
    """Return `nic`, `nic_latency` and `nic_direct`."""
    if ranks.machines == 1:
        return None, 0.0, False
    known = [(nic.bytes_per_second.median, nic) for nic in machine.nics if nic.bytes_per_second]
    if not known:
        raise MachineError(
            "nics",
            "is missing, and several machines exchange data over their network cards; add a card "
            "with its name and bytes_per_second",
        )
    fastest = max(rate for rate, _ in known)
    used = [(rate, nic) for rate, nic in known if rate >= NIC_SHARE * fastest]
    latencies = [nic.latency.median for _, nic in used if nic.latency]
    if not latencies:
        assumed.append(f"network: {NIC_LATENCY * 1e6:.0f} us of latency")
    direct = all(nic.direct for _, nic in used)
    return sum(rate for rate, _ in used), max(latencies, default=NIC_LATENCY), direct


def _node_rates(
    machine: Machine, i: int, moments: Moments, link: float, ranks: Ranks, assumed: list[str]
) -> NodeRates:
    """Return the rates of node `i`; `link` is the rate of unmeasured copies to and from the GPU."""
    node = machine.nodes[i]
    figures = [machine.rate(node.id, operation) for operation in ("read", "write", "copy")]
    figures += [machine.sweep_rate(node.id, of) for of in (moments, "fp32")]
    read, write, copy, sweep, fp32_sweep = (figure.median if figure else None for figure in figures)
    firmware = node.firmware
    read = read or (firmware.read_bandwidth if firmware else None)
    write = write or (firmware.write_bandwidth if firmware else None)
    if _only_short_sweeps(node):
        # A sweep is no faster than memory, which was measured with buffers larger than the caches.
        fastest = max((2 * copy if copy else 0.0, read or 0.0, write or 0.0)) or math.inf
        sweep, fp32_sweep = (min(rate, fastest) if rate else None for rate in (sweep, fp32_sweep))
    together = machine.rate(node.id, "shared")
    shared = together.median if together else None
    # A copy reads and writes each byte. Whatever was reached once is possible.
    reached = (2 * copy if copy else None, read, write, sweep, fp32_sweep, shared)
    total = max((r for r in reached if r), default=None)
    if total is None:
        copy = _assumed_copy(machine, node, assumed)
        total = 2 * copy
    if sweep is None:
        sweep = SWEEP_SHARE * (2 * copy if copy else total)
        assumed.append(
            f"node {node.id}: optimizer sweep at {sweep / 1e9:.0f} GB/s, from the copy rate"
        )
    to_gpu = _rank_transfer(machine, "h2d", node.id, ranks)
    from_gpu = _rank_transfer(machine, "d2h", node.id, ranks)
    h2d, d2h = (_transfer(machine, way, node.id, all_gpus=True) for way in ("h2d", "d2h"))
    return NodeRates(
        read=max(read or total, h2d or 0.0, SHARED_READS * (shared or 0.0)),
        write=max(write or total, d2h or 0.0, SHARED_WRITES * (shared or 0.0)),
        total=total,
        sweep=sweep,
        to_gpu=to_gpu or link or total,
        from_gpu=from_gpu or link or total,
    )


def _only_short_sweeps(node: MemoryNode) -> bool:
    """Return whether all sweeps measured on a node may have run in a cache."""
    sweeps = [rate.parameters for rate in node.rates if rate.operation == "sweep"]
    return all(parameters is not None and parameters < LONG_SWEEP for parameters in sweeps)


def _rank_transfer(machine: Machine, direction: str, node: int, ranks: Ranks) -> float | None:
    """Return the measured rate of one of the GPUs that share a node.

    That is the first GPU's own rate if it was measured, and no more than its part of what as many
    GPUs reached together.
    """
    first = machine.gpus[0].index if machine.gpus else None
    alone = _transfer(machine, direction, node, gpu=first) or _transfer(machine, direction, node)
    sharing = ranks.on_node(node)
    together = [
        t.bytes_per_second.median / sharing
        for t in machine.transfers
        if t.direction == direction and t.node == node and len(t.gpus) == sharing > 1
    ]
    return min([alone, *together]) if alone is not None else max(together, default=None)


def _transfer(
    machine: Machine, direction: str, node: int | None, *, all_gpus: bool = False,
    gpu: int | None = None,
) -> float | None:  # fmt: skip
    """Return the best measured transfer rate; with `all_gpus`, also of several GPUs together."""
    rates = [
        t.bytes_per_second.median
        for t in machine.transfers
        if t.direction == direction
        and node in (None, t.node)
        and (all_gpus or len(t.gpus) == 1)
        and (gpu is None or t.gpus == (gpu,))
    ]  # fmt: skip
    return max(rates, default=None)


def _disk(i: int, storage: StoragePath) -> DiskRates:
    """Return the best measured rates of a path."""
    best: dict[str, float] = {}
    for rate in storage.rates:
        best[rate.operation] = max(best.get(rate.operation, 0.0), rate.bytes_per_second.median)
    for operation in ("read", "write"):
        if operation not in best:
            raise MachineError(
                f"storage[{i}].rates",
                f"must contain a {operation} rate; measure it with `penstock probe --storage`",
            )
    return DiskRates(read=best["read"], write=best["write"], both=best.get("both"))


def _assumed_copy(machine: Machine, node: MemoryNode, assumed: list[str]) -> float:
    """Return the copy rate of an unmeasured node, from the number of cores."""
    cores = machine.cpu.cores or sum(len(each.cpus) for each in machine.dram_nodes) or 1
    copy = min(cores * CORE_COPY, MOST_COPIED[node.kind])
    assumed.append(f"node {node.id}: copies at {copy / 1e9:.0f} GB/s; `penstock probe` measures it")
    return copy
