"""Observing a program that uses a GPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.observe.run_files import read_run
from penstock.units import MiB

cuda: Any = torch.cuda  # it lacks type annotations

pytestmark = pytest.mark.gpu


def test_copies_are_recorded_with_their_bytes_and_kind(tmp_path: Path) -> None:
    pinned = torch.empty(8 * MiB, dtype=torch.uint8, pin_memory=True)
    pageable = torch.empty(2 * MiB, dtype=torch.uint8)
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with penstock.observe(tmp_path, exact=(2,)) as obs:
        for _ in range(3):
            with obs.phase("copies"):
                on_card = pinned.to("cuda", non_blocking=True)
                pageable.to("cuda")
                pinned.copy_(on_card, non_blocking=True)
                torch.cuda.synchronize()
            model(torch.ones(2, 64, device="cuda")).sum().backward()
            optimizer.step()
            obs.step()

    run = read_run(tmp_path)
    moved: Counter[tuple[str | None, bool | None]] = Counter()
    for event in run.events:
        if event.kind == "copy" and event.phase == "copies" and event.nbytes:
            moved[event.link, event.pinned] += event.nbytes
    assert moved["h2d", True] == 8 * MiB
    assert moved["h2d", False] == 2 * MiB
    assert moved["d2h", True] == 8 * MiB
    assert {event.step for event in run.events} == {2}
    assert any(event.kind == "kernel" for event in run.events)


def test_gpu_memory_is_sampled(tmp_path: Path) -> None:
    held = torch.empty(256 * MiB, dtype=torch.uint8, device="cuda")
    with penstock.observe(tmp_path, interval=0.005) as obs, obs.phase("hold"):
        for _ in range(200):
            torch.cuda.synchronize()
            cuda._sleep(2_000_000)

    samples = [s.gpu[0] for s in read_run(tmp_path).samples if s.gpu]
    assert max(gpu.allocated or 0 for gpu in samples) >= held.numel()
    assert max(gpu.peak or 0 for gpu in samples) >= max(gpu.allocated or 0 for gpu in samples)
    assert max(gpu.reserved or 0 for gpu in samples) >= held.numel()
    assert max(gpu.used or 0 for gpu in samples) >= held.numel()


def test_a_phase_lasts_until_the_gpu_has_finished_it(tmp_path: Path) -> None:
    """The host queues a second's work at once and names the next phase."""
    cycles = 1_000_000_000
    began, ended = (cuda.Event(enable_timing=True) for _ in range(2))
    with penstock.observe(tmp_path) as obs:
        with obs.phase("first"):
            torch.ones(1, device="cuda")
        with obs.phase("queued"):
            began.record()
            cuda._sleep(cycles)
            ended.record()
        with obs.phase("after"):
            torch.cuda.synchronize()

    (queued,) = [phase for phase in read_run(tmp_path).phases if phase.name == "queued"]
    taken = began.elapsed_time(ended) / 1e3
    # Between two events, the card may run other processes for a while. The host itself takes less
    # than a millisecond.
    assert taken > 0.2
    assert queued.seconds == pytest.approx(taken, rel=0.05, abs=0.1)
