"""Run every test marked `gpu` in parallel processes; called by `make test-gpu`.

    python3 tests/gpu/run.py [--jobs N] [--long] [TEST...]

The tests are collected by their marker, so tests in new files are found without a list. Each
process runs one test after the other, as this process hands them out. A process that crashes or
hangs fails its test only: another process replaces it. It needs torch, pytest and hypothesis and
an installed `penstock`, and no other pytest plugin.

Logs are in build/gpu-tests. The exit code is 1 if a test failed, did not run, or was skipped for a
reason that is not in ALLOWED_SKIPS.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "build/gpu-tests"

ALLOWED_SKIPS = ("needs a GPU of 24 GiB or more", "TRL is not installed")
"""Reasons (regular expressions) for which a test may be skipped on a machine with a GPU. Any other
skip is an error: a test that never runs shows nothing."""

SLOW_FIRST = ("tests/gpu", "tests/equivalence", "tests/train", "tests/generate", "tests/kv")
"""Directories whose tests take longest. They start first, so that no process is left with a long
test at the end."""

START_SECONDS = 180
"""Limit for collecting the tests, which imports torch and transformers."""

BAD = ("failed", "error", "crashed", "timed out", "not run")


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one test."""

    test: str
    outcome: str
    seconds: float
    detail: str = ""
    worker: int = 0

    @property
    def group(self) -> str:
        """The directory of the test, for the summary."""
        return str(Path(self.test.split("::")[0]).parent)


@dataclass(slots=True)
class Suite:
    """What to run, and what has been found so far. Threads share it under `lock`."""

    tests: list[str]
    jobs: int
    limit: float
    """Seconds that one test may take."""
    command: list[str]
    """Starts a process that replaces another one. It imports only the files that have tests."""
    logs: Path
    queue: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    results: list[Result] = field(default_factory=list)
    running: dict[int, tuple[str, float]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    deadline: float = float("inf")
    """Time of the monotonic clock after which no test starts."""

    def add(self, result: Result) -> None:
        with self.lock:
            self.results.append(result)
            self.running.pop(result.worker, None)


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    gpu = gpu_name()
    if gpu is None:
        print("test-gpu: torch finds no CUDA GPU here", file=sys.stderr)
        return 1
    print(f"test-gpu: {gpu}, {args.jobs} processes, logs in {LOGS.relative_to(ROOT)}", flush=True)
    marker = "gpu" if args.long else "gpu and not long"
    return run(
        args.tests, jobs=args.jobs, limit=args.timeout, logs=LOGS, marker=marker,
        start_within=args.start_within,
    )  # fmt: skip


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or directories")
    parser.add_argument("--jobs", type=int, default=max(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--timeout", type=float, default=450, help="seconds for one test")
    parser.add_argument("--long", action="store_true", help="run those marked `long`, too")
    parser.add_argument(
        "--start-within", type=float, default=float("inf"),
        help="start no test after this many seconds; the others are reported as not run",
    )  # fmt: skip
    return parser.parse_args(words)


def gpu_name() -> str | None:
    """Ask a child process, so that this one creates no CUDA context."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return found.stdout.strip() or None


def run(
    where: Sequence[str], *, jobs: int, limit: float, logs: Path, marker: str = "gpu",
    start_within: float = float("inf"),
) -> int:  # fmt: skip
    """Collect and run the tests with a marker, print a summary, and return the exit code."""
    began = time.monotonic()
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.gpu.worker",
               "-p", "no:cacheprovider", "-m", marker]  # fmt: skip
    # Importing the tests takes as long as listing them, so all processes do it at the same time.
    workers = [
        Worker(number, [*command, *where], logs / f"worker-{number:02d}.log")
        for number in range(1, jobs + 1)
    ]
    try:
        found = collect([*command, *where], logs)
        print(f"{len(found.tests)} tests collected in {time.monotonic() - began:.0f} s", flush=True)
        command += ["--rootdir", found.root, *found.files]
        suite = Suite(in_order(found.tests), jobs, limit, command, logs)
        suite.deadline = began + start_within
        with status_line(suite):
            run_all(suite, workers)
    finally:
        for worker in workers:
            worker.close()
    seconds = time.monotonic() - began
    problems = found.problems + find_problems(suite)
    print(summary(suite, seconds), flush=True)
    save(suite, seconds)
    if problems:
        print("\n".join(["", *problems]))
    print(f"\ntest-gpu: {'FAILED' if problems else 'passed'} after {seconds:.0f} s")
    return 1 if problems else 0


@dataclass(slots=True)
class Collection:
    """The tests that pytest found."""

    tests: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    root: str = str(ROOT)
    """The directory that the ids are relative to."""
    problems: list[str] = field(default_factory=list)
    """A line for each file that could not be read."""


def collect(command: Sequence[str], logs: Path) -> Collection:
    """Let pytest find the tests, in a process of its own."""
    found = Collection()
    with Worker(0, command, logs / "collect.log", orders=False) as worker:
        while (message := worker.receive(START_SECONDS)) is not None:
            if "uncollected" in message:
                last = message["detail"].strip().splitlines()[-1:]
                found.problems.append(f"not collected: {message['uncollected']}: {' '.join(last)}")
            elif "skipped_file" in message and not is_allowed(message["detail"]):
                skipped, reason = message["skipped_file"], message["detail"]
                found.problems.append(f"file skipped: {skipped}: {reason} (not in ALLOWED_SKIPS)")
            elif "collected" in message:
                found.tests = [test for test, _ in message["collected"]]
                found.files = sorted({path for _, path in message["collected"]})
                found.root = message["root"]
    if not found.tests:
        found.problems.append(f"no test was collected; see {logs / 'collect.log'}")
    return found


def in_order(tests: Sequence[str]) -> list[str]:
    def rank(test: str) -> int:
        return next((i for i, d in enumerate(SLOW_FIRST) if test.startswith(f"{d}/")), 99)

    return sorted(tests, key=rank)


def run_all(suite: Suite, workers: Sequence[Worker]) -> None:
    """Run every test: one thread for each process."""
    for test in suite.tests:
        suite.queue.put(test)
    threads = [
        threading.Thread(target=drive, args=(suite, worker), daemon=True)
        for worker in workers[: len(suite.tests)]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def drive(suite: Suite, first: Worker) -> None:
    """Hand tests to one process until none is left, and replace the process if it ends."""
    starts, number = 0, first.number
    while not suite.queue.empty() and starts < 20 and time.monotonic() < suite.deadline:
        starts += 1
        log = suite.logs / f"worker-{number:02d}-{starts}.log"
        with first if starts == 1 else Worker(number, suite.command, log) as worker:
            ready = worker.receive(START_SECONDS)
            while ready is not None and "ready" not in ready:
                ready = worker.receive(START_SECONDS)
            if ready is None:
                return  # what it should have run stays in the queue, and is reported as not run
            while time.monotonic() < suite.deadline and (test := _next(suite.queue)) is not None:
                if not run_one(suite, worker, test):
                    break


def _next(tests: queue.SimpleQueue[str]) -> str | None:
    try:
        return tests.get_nowait()
    except queue.Empty:
        return None


def run_one(suite: Suite, worker: Worker, test: str) -> bool:
    """Run a test in a worker's process. Return whether the process can run another one."""
    began = time.monotonic()
    suite.running[worker.number] = (test, began)
    worker.send(test)
    found = worker.receive(suite.limit)
    seconds = time.monotonic() - began
    if found is not None:
        detail, outcome = found["detail"], found["outcome"]
        suite.add(Result(test, outcome, found["seconds"], detail, worker.number))
        if outcome in BAD and "CUDA error" in detail:
            # The context of the process is lost, and every later test in it would fail as well.
            worker.kill()
            return False
        return True
    if worker.process.poll() is None:
        problem = f"took longer than {suite.limit:.0f} s; see {worker.log}"
        worker.kill()
        suite.add(Result(test, "timed out", seconds, problem, worker.number))
    else:
        problem = f"its process ended with code {worker.process.returncode}; see {worker.log}"
        suite.add(Result(test, "crashed", seconds, problem, worker.number))
    return False


class Worker:
    """A process that runs pytest with the plugin `worker.py`."""

    def __init__(
        self, number: int, command: Sequence[str], log: Path, *, orders: bool = True
    ) -> None:
        self.number, self.log = number, log
        read_orders, self._orders = os.pipe()
        self._reports, write_reports = os.pipe()
        self._received = b""
        environment = os.environ | {"PENSTOCK_GPU_REPORTS": str(write_reports)}
        if orders:
            environment["PENSTOCK_GPU_ORDERS"] = str(read_orders)
        # The processes share the machine's cores. Without limits each would start one compiler
        # process and one OpenMP thread for every core.
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        environment.setdefault("OMP_NUM_THREADS", "1")
        # Otherwise every process would compile all Python files again, where they have not been.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                [*command, "-o", "faulthandler_timeout=240"],
                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=stream,
                stderr=subprocess.STDOUT, pass_fds=(read_orders, write_reports),
                start_new_session=True,
            )  # fmt: skip
        os.close(read_orders)
        os.close(write_reports)

    def send(self, test: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # `receive` then reports that it ended
            os.write(self._orders, f"{test}\n".encode())

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Return the next message, or None if the process ended or took too long."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._reports], [], [], min(left, 1.0))[0]:
                # A child that a test left running may keep the pipe open, so ask the process too.
                if left <= 0 or self.process.poll() is not None:
                    return None
                continue
            more = os.read(self._reports, 1 << 16)
            if not more:
                self.process.wait()
                return None
            self._received += more
        line, self._received = self._received.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the process end, which it does when no test can follow, or kill it."""
        if self._orders < 0:
            return
        os.close(self._orders)
        self._orders = -1
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=30)
        self.kill()
        os.close(self._reports)

    def kill(self) -> None:
        """Kill the process and everything that its tests started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def status_line(suite: Suite) -> Iterator[None]:
    """Print one line on the state of the suite: rewritten on a terminal, else every 15 seconds."""
    done, terminal, began = threading.Event(), sys.stdout.isatty(), time.monotonic()

    def show() -> None:
        while not done.wait(0.5 if terminal else 15):
            with suite.lock:
                bad = sum(r.outcome in BAD for r in suite.results)
                finished, running = len(suite.results), dict(suite.running)
            now = time.monotonic()
            oldest = min(running.values(), key=lambda entry: entry[1], default=None)
            line = f"{now - began:4.0f} s  {finished}/{len(suite.tests)} done, {bad} failed"
            if oldest is not None:
                line += f", longest running {now - oldest[1]:.0f} s: {oldest[0]}"
            print(f"\r\033[K{line[:150]}" if terminal else line, end="" if terminal else "\n",
                  flush=True)  # fmt: skip

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        print("\r\033[K" if terminal else "", end="")


def is_allowed(reason: str) -> bool:
    return any(re.search(allowed, reason) for allowed in ALLOWED_SKIPS)


def find_problems(suite: Suite) -> list[str]:
    """Return a text for each test that did not pass, and why that fails the suite."""
    found = []
    for result in sorted(suite.results, key=lambda r: r.test):
        if result.outcome in BAD:
            found.append(f"{result.outcome}: {result.test}\n{_last_lines(result.detail)}")
        elif result.outcome == "skipped" and not is_allowed(result.detail):
            found.append(f"skipped: {result.test}: {result.detail} (not in ALLOWED_SKIPS)")
    counted = Counter(result.test for result in suite.results)
    for test in suite.tests:
        if counted[test] != 1:
            found.append(f"ran {counted[test]} times: {test}; see {suite.logs}")
    return found


def _last_lines(detail: str, count: int = 40) -> str:
    return "\n".join(f"    {line}" for line in detail.splitlines()[-count:])


def summary(suite: Suite, seconds: float) -> str:
    """Return a table of outcomes and seconds for each directory, and the slowest tests."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in suite.results:
        groups[result.group].append(result)
    width = max((len(group) for group in groups), default=5)
    lines = [f"{'':{width}}  passed  failed  skipped  seconds"]
    for group, results in [*sorted(groups.items()), ("all", suite.results)]:
        outcomes = Counter(result.outcome for result in results)
        bad = sum(outcomes[outcome] for outcome in BAD)
        good, skipped = outcomes["passed"] + outcomes["xfailed"], outcomes["skipped"]
        spent = sum(result.seconds for result in results)
        lines.append(f"{group:{width}}  {good:6}  {bad:6}  {skipped:7}  {spent:7.1f}")
    lines.append(f"slowest tests (of {seconds:.0f} s in {suite.jobs} processes):")
    slowest = sorted(suite.results, key=lambda result: -result.seconds)[:15]
    return "\n".join([*lines, *(f"  {r.seconds:6.1f} s  {r.test}" for r in slowest)])


def save(suite: Suite, seconds: float) -> None:
    """Write every result to results.json in the directory of the logs."""
    fields = ("test", "outcome", "seconds", "detail", "worker")
    results = [{name: getattr(r, name) for name in fields} for r in suite.results]
    record = {"seconds": seconds, "jobs": suite.jobs, "results": results}
    (suite.logs / "results.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
