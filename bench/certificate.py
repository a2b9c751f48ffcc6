"""A number's birth certificate: measured what, on what, when, from which commit, by which command.

Every benchmark writes one file under bench/results/, and every figure in the README names one.
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
    """p20, p50 and p80 of the samples, and how many there were."""
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
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", cpuinfo)
    meminfo = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    found: dict[str, object] = {
        "cpu": model[1] if model else platform.processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": int(meminfo[1]) * 1024 if meminfo else 0,
        "kernel": platform.release(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = torch.__version__
        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name()
            found["cuda"] = torch.version.cuda
    return found


def commit() -> str:
    """The commit, marked when the tree differs. BENCH_COMMIT comes first: a copy of the tree on
    another machine may have no git, or one that names another commit."""
    if named := os.environ.get("BENCH_COMMIT"):
        return named
    try:
        run = ["git", "-C", str(REPO), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command_line() -> list[str]:
    """The arguments, with the script named from the repository's root."""
    script = Path(sys.argv[0]).resolve()
    inside = script.is_relative_to(REPO)
    return [str(script.relative_to(REPO)) if inside else script.name, *sys.argv[1:]]


def short_name(machine: dict[str, object]) -> str:
    text = str(machine.get("gpu") or f"{machine['cpus']}x{machine['cpu']}")
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40]


def save(
    what: str,
    results: object,
    *,
    directory: Path | None = None,
    machine: dict[str, object] | None = None,
) -> Path:
    """Write `<what>_<hardware>_<date>.json` and return its path. The machine is this one, unless
    what was measured was recorded on another."""
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
