"""Measure copies between a GPU and placed memory, relative to torch's pinned memory. Needs CUDA.

bench_placement.py calls `run` where there is a GPU.
"""

from __future__ import annotations

import threading
import time

import torch

import penstock as ps
from bench.certificate import percentiles
from bench.measuring import available
from penstock import _native
from penstock.memory.region import RegionOptions, allocate_region
from penstock.units import GiB, KiB

COPY_NBYTES = GiB


def run(place: ps.Node, repeats: int) -> dict[str, object]:
    torch.cuda.init()
    return {
        "copies": copies(place, repeats),
        "odd_pinned": odd_pinned(place),
        "pinning": pinning(place, repeats=3),
        "registering_in_pieces": registering_in_pieces(place),
    }


def copies(place: ps.Node, repeats: int) -> dict[str, object]:
    """Time copies in both directions on the device, taking turns between kinds of host memory."""
    arena = ps.Arena(COPY_NBYTES, place, pinned=True)
    hosts = {
        "arena": arena.tensor(COPY_NBYTES, torch.uint8),
        "torch_pinned": torch.empty(COPY_NBYTES, dtype=torch.uint8, pin_memory=True),
        "pageable": torch.zeros(COPY_NBYTES, dtype=torch.uint8),
    }
    assert hosts["arena"].is_pinned()
    pattern = torch.randint(0, 255, (COPY_NBYTES,), dtype=torch.uint8, device="cuda")
    device = torch.empty_like(pattern)
    samples_of: dict[str, list[float]] = {f"{d}_{n}": [] for n in hosts for d in ("h2d", "d2h")}
    for number in range(repeats + 1):
        for name, host in hosts.items():
            d2h = _timed(host, pattern)
            h2d = _timed(device, host)
            if number:  # the first round is a warm-up
                samples_of[f"d2h_{name}"].append(COPY_NBYTES / d2h)
                samples_of[f"h2d_{name}"].append(COPY_NBYTES / h2d)
            assert torch.equal(device, pattern), f"{name} lost bytes"
            device.zero_()
    rates = {name: percentiles(samples) for name, samples in samples_of.items()}
    ratio = {
        d: rates[f"{d}_arena"]["p50"] / rates[f"{d}_torch_pinned"]["p50"] for d in ("h2d", "d2h")
    }
    return {"nbytes": COPY_NBYTES, "bytes_per_second": rates, "ratio_to_torch_pinned": ratio}


def _timed(target: torch.Tensor, source: torch.Tensor) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    target.copy_(source, non_blocking=True)
    stop.record()
    stop.synchronize()
    elapsed: float = start.elapsed_time(stop)
    return elapsed / 1e3


def odd_pinned(place: ps.Node) -> dict[str, int]:
    """Measure the memory that a pinned tensor of 1 GiB + 4 KiB uses.

    torch rounds pinned memory up to a power of two; Penstock rounds it up to a page.
    """
    wanted = GiB + 4 * KiB
    before = available()
    tensor = ps.empty(wanted, dtype=torch.uint8, place=place, pinned=True)
    region = _native.Region.at(tensor.data_ptr())
    assert region is not None
    placed = before - available()
    before = available()
    plain = torch.empty(wanted, dtype=torch.uint8, pin_memory=True)
    pinned = before - available()
    del tensor, plain
    return {
        "wanted": wanted,
        "mapped": region.mapped_nbytes,
        "available_drop_penstock": placed,
        "available_drop_torch": pinned,
    }


def pinning(place: ps.Node, repeats: int) -> dict[str, object]:
    nbytes = 4 * GiB
    seconds: dict[str, list[float]] = {"penstock": [], "torch": []}
    for _ in range(repeats):
        start = time.perf_counter()
        tensor = ps.empty(nbytes, dtype=torch.uint8, place=place, pinned=True)
        seconds["penstock"].append(time.perf_counter() - start)
        del tensor
        start = time.perf_counter()
        plain = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        seconds["torch"].append(time.perf_counter() - start)
        del plain
        _empty_host_cache()
    return {"nbytes": nbytes, "seconds": {k: percentiles(v) for k, v in seconds.items()}}


def _empty_host_cache() -> None:
    """Release torch's cached pinned blocks. Older versions have no public name for this."""
    homes = ((torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache"))
    for home, name in (*homes, (torch._C, "_accelerator_emptyHostCache")):
        if hasattr(home, name):
            getattr(home, name)()
            return


def registering_in_pieces(place: ps.Node) -> dict[str, object]:
    """Compare registering a range in pieces, from several threads, with registering it whole.

    Pieces are useful only if a copy that spans two of them works, so this is tested too.
    """
    nbytes, pieces = 8 * GiB, 8
    runtime = torch.cuda.cudart()
    options = RegionOptions()
    whole = allocate_region(nbytes, place, options)
    start = time.perf_counter()
    whole.register()
    whole_seconds = time.perf_counter() - start
    del whole

    region = allocate_region(nbytes, place, options)
    block = _native.Block(region)
    share = nbytes // pieces
    errors: list[int] = []

    def register(part: int) -> None:
        errors.append(int(runtime.cudaHostRegister(region.address + part * share, share, 1)))

    threads = [threading.Thread(target=register, args=(part,)) for part in range(pieces)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    several = time.perf_counter() - start
    spanning = _spans(block, share)
    for part in range(pieces):
        runtime.cudaHostUnregister(region.address + part * share)
    return {
        "nbytes": nbytes,
        "one_seconds": whole_seconds,
        "pieces": pieces,
        "pieces_seconds": several,
        "errors": sum(map(bool, errors)),
        "copy_across_a_seam": spanning,
    }


def _spans(block: _native.Block, share: int) -> str:
    host = torch.frombuffer(block, dtype=torch.uint8)[share - 64 * KiB : share + 64 * KiB]
    host.fill_(9)
    try:
        device = host.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        return "works" if bool((device == 9).all()) else "wrong bytes"
    except RuntimeError as failed:
        return f"fails: {str(failed).splitlines()[0]}"
