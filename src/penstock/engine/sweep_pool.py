"""The threads of a rank's optimizer sweeps, on the CPUs of its seat."""

from __future__ import annotations

import math
import os

from penstock.machine.limits import cpu_quota
from penstock.machine.sysfs import System
from penstock.optim.thread_pool import Pool
from penstock.plan.plan import Plan


def sweep_pool(plan: Plan, rank: int, threads: int | None, *, nice: int = 0) -> Pool:
    """Return the threads of a rank: by default one for each CPU of its seat.

    CPUs that the process may not use are left out. If none is left, or the plan has no seats, the
    threads run on any CPU.
    """
    seat = plan.seat(rank)
    usable = os.sched_getaffinity(0)
    cpus = [cpu for cpu in seat.cpus if cpu in usable] if seat is not None else []
    if not cpus:
        return Pool(threads, nice=nice)
    if threads is None:
        # The ranks of a machine are mostly in one control group, and share its CPU time.
        quota = cpu_quota(System())
        part = len(cpus) if quota is None else math.ceil(quota / len(plan.seats))
        threads = max(1, min(len(cpus), part))
    return Pool(threads, cpus=cpus, nice=nice)
