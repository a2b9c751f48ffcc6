"""Decide which transports the ranks of a plan could use."""

from __future__ import annotations

from penstock.errors import PlanError
from penstock.machine.machine import Machine
from penstock.plan.placement import TransportName


def usable_transports(machine: Machine, world: int) -> tuple[TransportName, ...]:
    """Return the transports that are worth planning for; none for a single rank.

    Ranks on several machines share no memory. GPUs on one machine use collective calls only if they
    reach each other: otherwise those pass through host memory as well, with more copies. Ranks that
    compute on CPUs use collective calls, which need no memory of their own.
    """
    if world == 1:
        return ()
    if machine.machines > 1 or not machine.gpus:
        return ("collective",)
    link = machine.gpu_link([gpu.index for gpu in machine.gpus[:world]])
    if link is None or link.kind == "none":
        return ("shared",)
    return ("shared", "collective")


def check_transport(machine: Machine, transport: TransportName) -> None:
    """Raise PlanError if ranks cannot use a transport that was asked for."""
    if transport == "shared" and machine.machines > 1:
        raise PlanError(
            "transport",
            f"is shared, but {machine.machines} machines share no memory; use collective or auto",
        )
