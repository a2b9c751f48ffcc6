"""Ranks on GPUs. One GPU is enough: NCCL with a single rank, and two ranks that share the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from penstock.distributed.gloo_ranks import GlooTransport
from penstock.distributed.nccl_ranks import NcclTransport
from penstock.distributed.peer_sockets import connect_ranks
from penstock.distributed.peer_watch import PeerWatch
from penstock.engine.device import CudaDevice
from tests.distributed.conformance import check_transport
from tests.distributed.test_process_ranks import check_processes
from tests.equivalence.runs import WAYS

pytestmark = pytest.mark.gpu


@pytest.fixture
def nccl() -> Iterator[NcclTransport]:
    store = dist.HashStore()
    watch = PeerWatch(connect_ranks(dist.PrefixStore("watch", store), 0, 1))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    transport = NcclTransport(GlooTransport(watch), CudaDevice(0))
    yield transport
    transport.close()
    watch.close()
    dist.destroy_process_group()


def test_nccl_moves_the_right_bytes(nccl: NcclTransport) -> None:
    check_transport(nccl, "cuda")


def test_nccl_calls_run_on_the_stream_of_their_lane(nccl: NcclTransport) -> None:
    """A call sees what was issued on its lane before it, and what follows sees its result."""
    device = CudaDevice(0)
    parts = torch.zeros(1 << 24, device="cuda")
    into = torch.full_like(parts, -1.0)
    torch.cuda.synchronize()
    for number in range(1, 6):
        with device.lane("ranks"):
            for _ in range(20):
                parts.add_(1.0)  # still running when the exchange is issued
            nccl.exchange(parts, into, 1)
            nccl.gather(into)
            found = into.clone()
            done = device.record()
        done.wait()
        assert (found == 20.0 * number).all()


def test_an_aborted_communicator_fails_later_calls(nccl: NcclTransport) -> None:
    nccl.exchange(torch.ones(8, device="cuda"), torch.zeros(8, device="cuda"), 1)
    nccl.abort(OSError("this rank broke"))

    with pytest.raises(Exception, match="lost rank 0: OSError: this rank broke"):
        nccl.gather(torch.zeros(8, device="cuda"))


@pytest.mark.parametrize("choice", ["some", *(way.name for way in WAYS[:3])])
def test_two_ranks_on_one_gpu_give_the_result_of_one(choice: str, tmp_path: Path) -> None:
    check_processes("shared", 2, choice, tmp_path)
