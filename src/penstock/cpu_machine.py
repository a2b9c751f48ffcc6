"""This host as a training machine of its own: the CPU computes where a GPU would. Room: decide.

What is called HBM is then a share of the first node's memory, as large as the budget says. Nothing
is a CUDA context, and copies are copies within memory.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.machine import Machine


def cpu_machine(machine: Machine) -> Machine:
    """The same host without its GPUs.

    How fast its cores compute, and a memory that nobody measured, is the cost model's to say
    (`cost.rates`), and said in what the plan assumed. Paths of the budget still have to be added:
    `budget.with_paths`.
    """
    name = f"{machine.name or 'this host'} (CPU)"
    return replace(machine, name=name, gpus=(), transfers=())
