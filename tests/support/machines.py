"""A small machine with every tier, for tests of planning."""

from __future__ import annotations

from penstock.machine.machine import (
    Cpu,
    Figure,
    Gpu,
    Machine,
    MemoryNode,
    MemoryRate,
    StoragePath,
    StorageRate,
    Transfer,
)
from penstock.units import GiB, MiB, TiB

rate = Figure.from_number


def machine(
    *,
    cards: int = 1,
    disk: float = 5e9,
    dram: float = 80e9,
    link: float = 25e9,
    flops: float = 50e12,
) -> Machine:
    """Return a machine with a GPU, a DRAM node, `cards` CXL nodes and a disk of these speeds."""

    def node(id: int, kind: str, speed: float) -> MemoryNode:
        rates = (
            MemoryRate(operation="copy", bytes_per_second=rate(speed / 2)),
            MemoryRate(operation="sweep", bytes_per_second=rate(0.9 * speed)),
        )
        return MemoryNode(id=id, kind=kind, capacity=TiB, rates=rates)  # type: ignore[arg-type]

    ids = range(1, 1 + cards)
    transfers = [
        Transfer(
            direction=way,  # type: ignore[arg-type]
            gpus=(0,),
            node=n,
            nbytes=256 * MiB,
            bytes_per_second=rate(link * (0.7 if n and way == "d2h" else 1.0)),
        )
        for n in (0, *ids)
        for way in ("h2d", "d2h")
    ]
    return Machine(
        name="test",
        cpu=Cpu(cores=8),
        nodes=(node(0, "dram", dram), *(node(n, "cxl", 40e9) for n in ids)),
        gpus=(
            Gpu(
                index=0,
                name="test GPU",
                memory=192 * GiB,
                block_flops=rate(flops),
                memory_bandwidth=rate(1e12),
            ),
        ),
        transfers=tuple(transfers),
        storage=(
            StoragePath(
                path="/mnt/nvme",
                capacity=4 * TiB,
                rated_writes=600 * 10**12,
                rates=tuple(
                    StorageRate(operation=op, block=8 * MiB, bytes_per_second=rate(disk))  # type: ignore[arg-type]
                    for op in ("read", "write")
                ),
            ),
        ),
    )
