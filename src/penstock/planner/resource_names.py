"""What the parts of a plan and of its cost are called when people read them. Room: show."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.machine.machine import Machine
from penstock.plan.plan import Plan
from penstock.tiers import Tier

_SHORT = {
    "read": "memory",
    "write": "memory",
    "disk": "nvme",
    "reads": "nvme",
    "writes": "nvme",
    "link": "pcie",
    "h2d": "pcie",
    "d2h": "pcie",
}


def short_name(resource: str) -> str:
    """For machines: `gpu`, `host`, `sweep`, `pcie`, `memory` or `nvme`."""
    kind = resource.split("@", maxsplit=1)[0]
    return _SHORT.get(kind, kind)


def long_name(resource: str, machine: Machine) -> str:
    """For people."""
    kind, _, place = resource.partition("@")
    where = f"node {place} ({machine.node(int(place)).kind})" if place.isdigit() else place
    match kind:
        case "gpu":
            return "GPU compute" if machine.gpus else "what the CPU computes"
        case "sweep":
            return f"the CPU's sweep on {where}"
        case "h2d":
            return "PCIe into the GPU"
        case "d2h":
            return "PCIe out of the GPU"
        case "link":
            return "PCIe, both ways together"
        case "host":
            return "what the host issues"
        case "disk":
            return f"NVMe at {where}"
        case "reads" | "writes":
            return f"NVMe {kind} at {where}"
        case _:
            return f"memory bandwidth of {where}"


def by_short_name(bounds: Mapping[str, float]) -> dict[str, float]:
    """Seconds of the critical path, with the parts of one thing added up, most first."""
    found: dict[str, float] = {}
    for resource, seconds in bounds.items():
        found[short_name(resource)] = found.get(short_name(resource), 0.0) + seconds
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def bound_by(bounds: Mapping[str, float]) -> str:
    return next(iter(by_short_name(bounds)))


def written_per_step(plan: Plan) -> int:
    """Bytes a step writes to NVMe: all that rests there is renewed once, inputs once a round.

    A frozen weight is not; several rounds write the gradient once each."""
    rounds = plan.placement.rounds
    total = 0
    for block in plan.placement.blocks:
        for home in block.homes:
            nbytes = home.on(Tier.NVME)
            if home.role == "weight" and block.sweep == "none":
                continue
            total += nbytes * (rounds if home.role in ("input", "gradient") else 1)
    return total
