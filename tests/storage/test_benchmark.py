"""The storage benchmark."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from penstock.cli import bench
from penstock.storage.benchmark import bench_storage
from penstock.units import KiB, MiB
from tests.support.disks import direct_directory


def test_the_benchmark_measures_every_pattern_and_reports_progress(tmp_path: Path) -> None:
    direct_directory(tmp_path)
    seen: list[float] = []

    rates = bench_storage(
        tmp_path, nbytes=8 * MiB, request_nbytes=[256 * KiB], passes=2, progress=seen.append
    )

    assert {(r.engine, r.pattern) for r in rates} >= {
        ("threads", "read"), ("threads", "write"), ("threads", "mixed"),
    }  # fmt: skip
    assert all(rate.median > 0 and len(rate.samples) == 2 for rate in rates)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    console = Console(width=200)
    with console.capture() as shown:
        console.print(bench.render_rates(rates))
    assert "mixed" in shown.get()
    assert os.listdir(tmp_path) == []
