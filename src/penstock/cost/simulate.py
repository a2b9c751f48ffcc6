"""Work over shared resources, event by event. Room: decide.

A job asks for seconds of resources: a copy of 1 GB asks for 20 ms of the link and 8 ms of the
memory it reads. It runs at full speed where nobody else wants the same, and where several do, all
of them slow down by the same factor until no resource is asked for more than it has. Jobs of one
lane run one after the other; a job also waits for those named in `after`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class Job:
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


class _Run:
    """The state of one simulation."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.missing = [len(set(job.after)) for job in jobs]
        self.waiting: dict[int, list[int]] = defaultdict(list)
        self.queues: dict[str, deque[int]] = defaultdict(deque)
        for i, job in enumerate(jobs):
            for j in set(job.after):
                self.waiting[j].append(i)
            if job.lane:
                self.queues[job.lane].append(i)
        self.started: dict[int, tuple[float, int | None]] = {}
        self.left: dict[int, float] = {}  # running -> the share of the job still to do
        self.spans: dict[int, Span] = {}
        self.speeds: dict[tuple[int, ...], tuple[float, ...]] = {}
        self.kind = [id(job.demands) for job in jobs]

    def run(self) -> list[Span]:
        now = 0.0
        fresh = [(i, None) for i in range(len(self.jobs)) if not self.missing[i]]
        self.finish(now, self.start(now, fresh))
        while self.left:
            running = list(self.left)
            speeds = self.speed(running)
            step = min(self.left[i] / s for i, s in zip(running, speeds, strict=True))
            now += step
            done = []
            for i, s in zip(running, speeds, strict=True):
                self.left[i] -= s * step
                if self.left[i] <= _EPSILON:
                    done.append(i)
            for i in done:
                del self.left[i]
            self.finish(now, done)
        assert len(self.spans) == len(self.jobs), "the schedule waits for itself"
        return [self.spans[i] for i in range(len(self.jobs))]

    def finish(self, now: float, done: list[int]) -> None:
        ended = deque(done)
        while ended:
            i = ended.popleft()
            begun, cause = self.started.pop(i)
            self.spans[i] = Span(begun, now, cause)
            free: list[tuple[int, int | None]] = []
            lane = self.jobs[i].lane
            if lane:
                self.queues[lane].popleft()
                if self.queues[lane]:
                    head = self.queues[lane][0]
                    if not self.missing[head]:
                        free.append((head, i))
            for j in self.waiting.pop(i, ()):
                self.missing[j] -= 1
                if not self.missing[j]:
                    free.append((j, i))
            ended.extend(self.start(now, free))

    def start(self, now: float, ready: Sequence[tuple[int, int | None]]) -> list[int]:
        """Start those whose turn it is; give back those that took no time."""
        instant = []
        for i, cause in ready:
            lane = self.jobs[i].lane
            if i in self.started or i in self.spans or (lane and self.queues[lane][0] != i):
                continue
            self.started[i] = (now, cause)
            if self.jobs[i].alone > 0:
                self.left[i] = 1.0
            else:
                instant.append(i)
        return instant

    def speed(self, running: list[int]) -> tuple[float, ...]:
        """The share of each job done per second. The same mix recurs for every layer, and jobs
        that ask for the same mostly share one mapping, so this is looked up far more than found."""
        key = tuple(self.kind[i] for i in running)
        if key not in self.speeds:
            self.speeds[key] = share([self.jobs[i].demands for i in running])
        return self.speeds[key]


def simulate(jobs: Sequence[Job]) -> list[Span]:
    """When each job starts and ends."""
    return _Run(jobs).run()


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
            for resource, seconds in demands[i].items():
                load[resource] += seconds / alone[i]
        room = min(((1.0 - used[r]) / load[r] for r in load if load[r] > 0), default=1.0 - level)
        rise = min(room, 1.0 - level)
        level += rise
        for r, seconds in load.items():
            used[r] += seconds * rise
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
