"""Work over shared resources, event by event. Room: decide.

A job asks for seconds of resources: a copy of 1 GB asks for 20 ms of the link and 8 ms of the
memory it reads. It runs at full speed where nobody else wants the same, and where several do, all
of them slow down by the same factor until no resource is asked for more than it has. Jobs of one
lane run one after the other; a job also waits for those named in `after`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_EPSILON = 1e-12

Speeds = dict[tuple[int, ...], tuple[float, ...]]
"""How fast jobs run together, by the identity of their demands: the same mix recurs for every
layer, so this is looked up far more often than it is found."""


class Job(NamedTuple):
    """A piece of work."""

    lane: str
    """Whose turn it waits for; "" for none."""

    demands: Mapping[str, float]
    """Seconds of each resource. Empty: done in no time."""

    after: tuple[int, ...] = ()
    """Jobs that must have ended, by their place in the list; all of them earlier."""

    @property
    def alone(self) -> float:
        """Seconds with everything to itself."""
        return max(self.demands.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class Span:
    """When a job ran, and what it waited for last."""

    start: float
    """Seconds from the beginning."""

    end: float
    """Seconds from the beginning."""

    cause: int | None
    """The job whose end let it start."""


class _Simulation:
    """The state of one simulation. A lane's order is one more job to wait for."""

    def __init__(self, jobs: Sequence[Job], speeds: Speeds) -> None:
        self.jobs, self.speeds = jobs, speeds
        self.missing: list[int] = []
        self.waiting: list[list[int]] = []
        self.kinds = [id(job.demands) for job in jobs]
        latest: dict[str, int] = {}
        for i, (lane, _, after) in enumerate(jobs):
            before = set(after)
            if lane:
                if lane in latest:
                    before.add(latest[lane])
                latest[lane] = i
            self.missing.append(len(before))
            self.waiting.append([])
            for j in before:
                self.waiting[j].append(i)
        self.starts = [0.0] * len(jobs)
        self.ends = [-1.0] * len(jobs)
        self.causes: list[int | None] = [None] * len(jobs)

    def run(self) -> None:
        now = 0.0
        running = self.begin(now, [i for i, count in enumerate(self.missing) if not count])
        left = [1.0] * len(running)  # the share of each still to do
        while running:
            speeds = self.speed(running)
            step = min([a / s for a, s in zip(left, speeds, strict=True)])
            now += step
            left = [a - s * step for a, s in zip(left, speeds, strict=True)]
            done = [i for i, a in zip(running, left, strict=True) if a <= _EPSILON]
            running = [i for i, a in zip(running, left, strict=True) if a > _EPSILON]
            left = [a for a in left if a > _EPSILON]
            fresh = self.begin(now, self.end(now, done))
            running += fresh
            left += [1.0] * len(fresh)
        assert min(self.ends, default=0.0) >= 0.0, "the schedule waits for itself"

    def end(self, now: float, done: list[int]) -> list[int]:
        """Those that can start now."""
        missing = self.missing
        free: list[int] = []
        for i in done:
            self.ends[i] = now
            for j in self.waiting[i]:
                missing[j] -= 1
                if not missing[j]:
                    self.causes[j] = i
                    free.append(j)
        return free

    def begin(self, now: float, ready: list[int]) -> list[int]:
        """Those of them that take time; the others end at once, and let more begin."""
        working: list[int] = []
        while ready:
            instant: list[int] = []
            for i in ready:
                self.starts[i] = now
                (working if self.jobs[i].demands else instant).append(i)
            ready = self.end(now, instant)
        return working

    def speed(self, running: list[int]) -> tuple[float, ...]:
        key = tuple([self.kinds[i] for i in running])
        found = self.speeds.get(key)
        if found is None:
            found = self.speeds[key] = share([self.jobs[i].demands for i in running])
        return found


def simulate(jobs: Sequence[Job]) -> list[Span]:
    """When each job starts and ends."""
    run = _Simulation(jobs, {})
    run.run()
    return [Span(*times) for times in zip(run.starts, run.ends, run.causes, strict=True)]


def seconds(jobs: Sequence[Job], speeds: Speeds) -> float:
    """When the last one ends. `speeds` may be kept for other jobs, as long as their demands are."""
    run = _Simulation(jobs, speeds)
    run.run()
    return max(run.ends, default=0.0)


def share(demands: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """Speeds of jobs that run together: all at the same fraction of their own best, until a
    resource is full; those that need it stop there and the others go on."""
    alone = [max(d.values()) for d in demands]
    pace = [0.0] * len(demands)
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
            pace[i] = level
        rising -= stopped or set(rising)
    return tuple(max(p, 1e-9) / a for p, a in zip(pace, alone, strict=True))


def critical_path(spans: Sequence[Span]) -> list[int]:
    """The chain of jobs that ends last, first to last: shorten one of them or nothing changes."""
    at: int | None = max(range(len(spans)), key=lambda i: spans[i].end)
    chain = []
    while at is not None:
        chain.append(at)
        at = spans[at].cause
    return chain[::-1]
