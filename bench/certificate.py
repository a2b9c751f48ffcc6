"""Results files: what was measured, on what hardware, when, at which commit and by which command.

Every benchmark writes one file to bench/results/, and every figure in the documentation links to
one.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPO = Path(__file__).parents[1]
RESULTS = REPO / "bench/results"


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """Return the 20th, 50th and 80th percentile of the samples, and their number."""
    ordered = sorted(samples)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {
        "p20": at(0.2),
        "p50": statistics.median(ordered),
        "p80": at(0.8),
        "samples": len(ordered),
    }


def hardware() -> dict[str, object]:
    """Describe this machine: CPU, memory, kernel, and torch and GPU if torch is imported."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", cpuinfo)
    meminfo = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    description: dict[str, object] = {
        "cpu": model[1] if model else platform.processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": int(meminfo[1]) * 1024 if meminfo else 0,
        "kernel": platform.release(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        description["torch"] = torch.__version__
        if torch.cuda.is_available():
            description["gpu"] = torch.cuda.get_device_name()
            description["cuda"] = torch.version.cuda
    return description


def commit() -> str:
    """Return the commit, marked as dirty if files have changed.

    The environment variable BENCH_COMMIT takes precedence: a copy of the tree on another machine
    may have no git repository, or one with another commit.
    """
    if named := os.environ.get("BENCH_COMMIT"):
        return named
    try:
        command = ["git", "-C", str(REPO), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command_line() -> list[str]:
    """Return the command line, with the script's path relative to the repository."""
    script = Path(sys.argv[0]).resolve()
    inside = script.is_relative_to(REPO)
    return [str(script.relative_to(REPO)) if inside else script.name, *sys.argv[1:]]


def short_name(machine: dict[str, object]) -> str:
    """Return the part of a file name that identifies the hardware."""
    text = str(machine.get("gpu") or f"{machine['cpus']}x{machine['cpu']}")
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40]


def save(
    what: str,
    results: object,
    *,
    directory: Path | None = None,
    machine: dict[str, object] | None = None,
) -> Path:
    """Write `<what>_<hardware>_<date>.json` and return its path.

    Pass `machine` if the measurement was recorded on another machine than this one.
    """
    machine = machine or hardware()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    certificate = {
        "what": what,
        "date": today,
        "commit": commit(),
        "command": shlex.join(["python", *command_line()]),
        "hardware": machine,
        "results": results,
    }
    directory = directory or Path(os.environ.get("BENCH_RESULTS", RESULTS))
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{what}_{short_name(machine)}_{today}.json"
    path.write_text(json.dumps(certificate, indent=1) + "\n")
    return path
