"""Place tensors on chosen memory nodes, and move them.

    python examples/placement.py

Runs on any Linux machine, even with a single node.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

import penstock as ps
from penstock.units import MiB, format_bytes


def main() -> None:
    console = Console()
    machine = ps.discover()
    console.print("This example places tensors on memory nodes and asks the kernel for them.\n")
    show_nodes(console, machine)

    nodes = [node.id for node in machine.nodes]
    last = nodes[-1]
    numel = 64 * MiB // 4
    tensors = {
        f"empty(place=Node({last}), pinned=True)": ps.empty(
            numel, place=ps.Node(last), pinned=True
        ),
        f"zeros(place=Stripe({dict.fromkeys(nodes, 1)}))": ps.zeros(numel, place=ps.Stripe(nodes)),
        f"full(1.0, place=Interleave({nodes}))": ps.full(numel, 1.0, place=ps.Interleave(nodes)),
        "torch.ones: PyTorch's own allocator": torch.ones(numel),
    }
    table = Table(title="Locations reported by the kernel", title_justify="left")
    table.add_column("tensor (64 MiB)")
    table.add_column("pages")
    for name, tensor in tensors.items():
        table.add_row(name, str(ps.where(tensor)))
    console.print(table)

    show_arena(console, last)
    show_move(console, nodes)


def show_nodes(console: Console, machine: ps.Machine) -> None:
    table = Table(title="Memory nodes", title_justify="left")
    for column in ("node", "kind", "capacity", "free", "CPUs"):
        table.add_column(column, justify="right")
    for node in machine.nodes:
        free = "-" if node.free is None else format_bytes(node.free)
        row = (str(node.id), node.kind, format_bytes(node.capacity), free, str(len(node.cpus)))
        table.add_row(*row)
    console.print(table)


def show_arena(console: Console, node: int) -> None:
    arena = ps.Arena("16MiB", ps.Node(node), pinned=True)
    weight = arena.tensor((1024, 1024), torch.bfloat16)
    bias = arena.tensor(1000, torch.float32)
    console.print(
        f"\nAn arena with several tensors: {arena} contains {weight.shape} and {bias.shape}"
    )


def show_move(console: Console, nodes: list[int]) -> None:
    tensor = ps.full(MiB, 3.0, place=ps.Node(nodes[0]))
    address = tensor.data_ptr()
    ps.move(tensor, ps.Node(nodes[-1]))
    assert tensor.data_ptr() == address
    assert bool((tensor == 3).all())
    where = ps.where(tensor)
    console.print(f"Moved from node {nodes[0]} to node {nodes[-1]} at the same address: {where}")
    console.print("\nNext: `.venv/bin/penstock doctor`, `.venv/bin/penstock probe --quick`")


if __name__ == "__main__":
    main()
