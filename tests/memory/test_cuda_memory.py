"""Placed memory with a real GPU: registration, size, copies and release."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

import penstock as ps
from penstock import _native
from penstock.memory.placement import Place
from penstock.units import GiB, KiB, MiB

pytestmark = pytest.mark.gpu


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda")


def test_the_driver_is_found() -> None:
    assert _native.cuda_devices() == torch.cuda.device_count() > 0
    assert _native.cuda_why_none() == ""


def test_torch_sees_pinned_memory(place: Place) -> None:
    tensor = ps.empty(3 * MiB + 5, dtype=torch.uint8, place=place, pinned=True)

    assert tensor.is_pinned()
    assert tensor[7:100].is_pinned()
    assert not ps.empty(MiB, place=place).is_pinned()


def test_copies_to_and_from_the_gpu_preserve_every_byte(place: Place) -> None:
    sent = random_bytes(64 * MiB + 3)
    host = ps.empty(sent.numel(), dtype=torch.uint8, place=place, pinned=True)

    host.copy_(sent, non_blocking=True)
    torch.cuda.synchronize()
    back = host.to("cuda", non_blocking=True)

    assert torch.equal(back, sent)
    assert torch.equal(host, sent.cpu())


def test_torch_sees_the_first_pinned_tensor_of_a_process_as_pinned() -> None:
    code = "import penstock as ps; raise SystemExit(not ps.zeros(5, pinned=True).is_pinned())"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_arena_is_pinned_as_a_whole(place: Place) -> None:
    arena = ps.Arena(8 * MiB, place, pinned=True)
    tensors = [arena.tensor(MiB, torch.uint8) for _ in range(8)]

    assert arena.pinned
    assert all(tensor.is_pinned() for tensor in tensors)


def test_a_pinned_tensor_occupies_only_its_pages() -> None:
    wanted = GiB + 4 * KiB
    tensor = ps.empty(wanted, dtype=torch.uint8, pinned=True)
    region = _native.Region.at(tensor.data_ptr())

    assert region is not None
    assert region.mapped_nbytes == wanted


def test_a_moved_tensor_is_pinned_again(place: Place) -> None:
    sent = random_bytes(4 * MiB)
    tensor = ps.empty(4 * MiB, dtype=torch.uint8, pinned=True)
    tensor.copy_(sent)

    ps.move(tensor, place)

    assert tensor.is_pinned()
    assert torch.equal(tensor.to("cuda", non_blocking=True), sent)


def test_freeing_memory_waits_for_copies_in_flight() -> None:
    """Without that, the copy could read pages that were reused meanwhile."""
    for round_ in range(4):
        host = ps.full(512 * MiB, round_ + 1, dtype=torch.uint8, pinned=True)
        device = torch.empty(512 * MiB, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(200_000_000)  # the copy is queued behind about 100 ms of work
        device.copy_(host, non_blocking=True)
        address = host.data_ptr()
        del host
        gc.collect()
        assert _native.Region.at(address) is None
        assert bool((device == round_ + 1).all())


def test_freed_memory_is_unregistered_from_cuda() -> None:
    """Otherwise registering the same addresses again would fail."""
    for _ in range(20):
        tensor = ps.empty(64 * MiB, dtype=torch.uint8, pinned=True)
        assert tensor.is_pinned()
        del tensor


def test_memory_can_be_pinned_from_a_thread_without_a_context() -> None:
    import threading

    tensors: list[torch.Tensor] = []
    thread = threading.Thread(
        target=lambda: tensors.append(ps.empty(MiB, dtype=torch.uint8, pinned=True))
    )
    thread.start()
    thread.join()

    assert tensors[0].is_pinned()
