"""Names of resources and roles, as users and programs read them."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.machine.machine import Machine
from penstock.roles import OptimizerName

_SHORT_NAMES = {
    "read": "memory",
    "write": "memory",
    "disk": "nvme",
    "reads": "nvme",
    "writes": "nvme",
    "link": "pcie",
    "h2d": "pcie",
    "d2h": "pcie",
    "peer": "links",
    "socket": "sockets",
    "nic": "network",
}

ROLE_NAMES = {
    "weight": "weights",
    "frozen": "frozen weights",
    "master": "master weights",
    "first": "first moments",
    "second": "second moments",
    "gradient": "gradients",
    "input": "activations",
    "attention": "attention results",
}
"""Names of roles in tables for people."""

STATE_NAMES = {
    ("sgd", "first"): "momentum",
    ("muon", "first"): "momentum and first moments",
    ("adafactor", "second"): "second moments of rows and columns",
}
"""Names of roles in tables for people, by optimizer, if they differ from `ROLE_NAMES`."""


def role_name(role: str, optimizer: OptimizerName) -> str:
    """Return the name of a role, or of a buffer, in a table for people."""
    return STATE_NAMES.get((optimizer, role), ROLE_NAMES.get(role, role))


VERB_NAMES = {"sweep": "optimizer sweep", "drain": "offload"}
"""Names of operations and phases in tables for people, if they differ from the schedule's."""


def short_name(resource: str) -> str:
    """Return the name for programs: `gpu`, `host`, `sweep`, `pcie`, `memory` or `nvme`.

    With several GPUs also `links` (between GPUs), `sockets` and `network`.
    """
    kind = resource.split("@", maxsplit=1)[0]
    return _SHORT_NAMES.get(kind, kind)


def long_name(resource: str, machine: Machine) -> str:
    """Return the name for people, such as "memory bandwidth of node 0 (dram)"."""
    kind, _, place = resource.partition("@")
    where = f"node {place} ({machine.node(int(place)).kind})" if place.isdigit() else place
    match kind:
        case "gpu":
            return "GPU compute" if machine.gpus else "CPU compute"
        case "sweep":
            return f"the CPU optimizer sweep on {where}"
        case "h2d":
            return "PCIe copies to the GPU"
        case "d2h":
            return "PCIe copies from the GPU"
        case "link":
            return "PCIe copies in both directions"
        case "peer":
            return "links between GPUs"
        case "socket":
            return "links between sockets"
        case "nic":
            return "the network between machines"
        case "host":
            return "host time to launch kernels and issue copies"
        case "disk":
            return f"NVMe at {where}"
        case "reads" | "writes":
            return f"NVMe {kind} at {where}"
        case _:
            return f"memory bandwidth of {where}"


def by_short_name(bounds: Mapping[str, float]) -> dict[str, float]:
    """Sum seconds of the critical path by short name, most first."""
    totals: dict[str, float] = {}
    for resource, seconds in bounds.items():
        totals[short_name(resource)] = totals.get(short_name(resource), 0.0) + seconds
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def bound_by(bounds: Mapping[str, float]) -> str:
    """Return the short name of the resource that limits most of the critical path."""
    return next(iter(by_short_name(bounds)))
