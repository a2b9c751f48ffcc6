"""Simulate jobs over shared resources, event by event.

A job needs seconds of resources: a copy of 1 GB may need 20 ms of the PCIe link and 8 ms of the
memory it reads. It runs at full speed if no other job needs the same resources. Otherwise all
competing jobs slow down by the same factor, until no resource is overcommitted. Jobs of one lane
run one after the other, and a job also waits for the jobs named in `after`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import truediv
from typing import NamedTuple

_EPSILON = 1e-12

SpeedCache = dict[tuple[int, ...], tuple[float, ...]]
"""Speeds of jobs that run together, by the identity of their demands. The same mix recurs for every
layer, so most speeds are looked up rather than computed."""


class Job(NamedTuple):
    """Work that needs time of resources."""

    lane: str
    """The lane whose jobs run one after the other; "" for none."""

    demands: Mapping[str, float]
    """Seconds of each resource that it needs. A job without demands takes no time."""

    after: tuple[int, ...] = ()
    """Indices of jobs that must have ended. All of them are earlier in the list."""

    @property
    def alone(self) -> float:
        """Seconds it takes when no other job runs."""
        return max(self.demands.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class JobSpan:
    """When a job ran, and what it waited for last."""

    start: float
    """Start in seconds from the beginning of the step."""

    end: float
    """End in seconds from the beginning of the step."""

    cause: int | None
    """Index of the job whose end allowed it to start, or None if it started immediately."""


class _Simulation:
    """The state of one simulation."""

    def __init__(self, jobs: Sequence[Job], speeds: SpeedCache) -> None:
        self.jobs, self.speeds = jobs, speeds
        self.missing: list[int] = []
        """For each job, how many of the jobs it waits for have not ended. A job that is named twice
        counts twice, here and in `waiting`."""
        self.waiting: list[list[int]] = [[] for _ in jobs]
        """For each job, the jobs that wait for it."""
        # The order of a lane is a dependency on the lane's previous job.
        latest: dict[str, int] = {}
        for i, (lane, _, after) in enumerate(jobs):
            count = len(after)
            for j in after:
                self.waiting[j].append(i)
            if lane:
                if lane in latest:
                    self.waiting[latest[lane]].append(i)
                    count += 1
                latest[lane] = i
            self.missing.append(count)
        self.starts = [0.0] * len(jobs)
        self.ends = [-1.0] * len(jobs)
        self.causes: list[int | None] = [None] * len(jobs)

    def run(self) -> None:
        """Advance from one job's end to the next until all jobs have ended."""
        now = 0.0
        running: list[int] = []
        kinds: list[int] = []  # identity of the demands of each
        left: list[float] = []  # fraction of each that is still to do
        ready = [i for i, count in enumerate(self.missing) if not count]
        while True:
            for i in self.begin(now, ready):
                running.append(i)
                kinds.append(id(self.jobs[i].demands))
                left.append(1.0)
            if not running:
                break
            key = tuple(kinds)
            speeds = self.speeds.get(key)
            if speeds is None:
                speeds = self.speeds[key] = share([self.jobs[i].demands for i in running])
            step = min(map(truediv, left, speeds))
            now += step
            left = [fraction - speed * step for fraction, speed in zip(left, speeds, strict=True)]
            done = [k for k, fraction in enumerate(left) if fraction <= _EPSILON]
            ready = self.end(now, [running[k] for k in done])
            for k in reversed(done):
                del running[k], kinds[k], left[k]
        assert min(self.ends, default=0.0) >= 0.0, "jobs wait for each other in a cycle"

    def end(self, now: float, done: list[int]) -> list[int]:
        """End jobs, and return those that can start now."""
        missing = self.missing
        ready: list[int] = []
        for i in done:
            self.ends[i] = now
            for j in self.waiting[i]:
                missing[j] -= 1
                if not missing[j]:
                    self.causes[j] = i
                    ready.append(j)
        return ready

    def begin(self, now: float, ready: list[int]) -> list[int]:
        """Start jobs, and return those that take time.

        Jobs without demands end immediately, and may allow more jobs to start.
        """
        working: list[int] = []
        while ready:
            instant: list[int] = []
            for i in ready:
                self.starts[i] = now
                (working if self.jobs[i].demands else instant).append(i)
            ready = self.end(now, instant) if instant else instant
        return working


def simulate(jobs: Sequence[Job]) -> list[JobSpan]:
    """Return when each job starts and ends."""
    simulation = _Simulation(jobs, {})
    simulation.run()
    times = zip(simulation.starts, simulation.ends, simulation.causes, strict=True)
    return [JobSpan(*each) for each in times]


def simulate_seconds(jobs: Sequence[Job], speeds: SpeedCache) -> float:
    """Return when the last job ends.

    `speeds` may be reused for other jobs, as long as the demands of all of them are alive.
    """
    simulation = _Simulation(jobs, speeds)
    simulation.run()
    return max(simulation.ends, default=0.0)


def share(demands: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """Return the speeds of jobs that run together (max-min fair sharing).

    All jobs rise together to the same fraction of their own best speed. When a resource is full,
    the jobs that need it stay at that fraction, and the others continue to rise.
    """
    alone = [max(d.values()) for d in demands]
    fraction = [0.0] * len(demands)
    rising = set(range(len(demands)))
    used: dict[str, float] = defaultdict(float)
    level = 0.0
    while rising:
        load: dict[str, float] = defaultdict(float)
        for i in rising:
            for resource, wanted in demands[i].items():
                load[resource] += wanted / alone[i]
        room = min(((1.0 - used[r]) / load[r] for r in load if load[r] > 0), default=1.0 - level)
        rise = min(room, 1.0 - level)
        level += rise
        for r, wanted in load.items():
            used[r] += wanted * rise
        full = {r for r in load if used[r] >= 1.0 - 1e-9}
        stopped = {i for i in rising if level >= 1.0 - 1e-9 or full & demands[i].keys()}
        for i in stopped or rising:
            fraction[i] = level
        rising -= stopped or set(rising)
    return tuple(max(f, 1e-9) / a for f, a in zip(fraction, alone, strict=True))


def critical_path(spans: Sequence[JobSpan]) -> list[int]:
    """Return the chain of jobs that ends last, in order. The step is shorter only if one of them
    is."""
    at: int | None = max(range(len(spans)), key=lambda i: spans[i].end)
    chain = []
    while at is not None:
        chain.append(at)
        at = spans[at].cause
    return chain[::-1]
