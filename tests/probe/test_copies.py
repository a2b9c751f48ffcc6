"""GPU copies over simulated links; one test needs a GPU."""

from __future__ import annotations

import pytest

from penstock.probe import copies
from penstock.probe.measurement import Progress
from penstock.units import GiB, MiB
from tests.support.probing import TINY, FakeCopier


def test_transfers_count_every_gpu_and_both_directions():
    (both_gpus,) = copies.plan([0, 1], 256 * MiB, quick=True)[2:]
    transfers = list(copies.probe_group(0, both_gpus, FakeCopier(), TINY, Progress(3)))
    rates = {t.direction: t.bytes_per_second.median for t in transfers}
    assert rates == pytest.approx({"h2d": 100e9, "d2h": 100e9, "both": 120e9})
    assert {t.nbytes for t in transfers} == {
        16 * MiB
    }  # 256 MiB for two GPUs and two directions would not fit


def test_copies_larger_than_the_buffers_are_skipped_with_a_note():
    progress = Progress(0)
    (wanted,) = copies.plan([3], GiB, quick=True)
    transfers = list(copies.probe_group(0, wanted, FakeCopier(), TINY, progress))
    assert {t.nbytes for t in transfers} == {MiB, 16 * MiB}
    assert progress.notes[0] == (
        "node 0 and GPU 3: h2d, 256 MiB, 1 stream: not measured: the buffers only hold 64.0 MiB"
    )


def test_a_full_probe_copies_from_1_mib_to_1_gib():
    (wanted,) = copies.plan([0], 2 * GiB, quick=False)
    assert {c.nbytes for c in wanted} == {MiB, 4 * MiB, 16 * MiB, 64 * MiB, 256 * MiB, GiB}
    assert {c.streams for c in wanted} == {1, 4}


@pytest.mark.gpu
def test_real_copies_transfer_data_and_are_measured():
    from penstock.machine.discovery import discover

    ordinals = copies.cuda_ordinals(discover().gpus)
    copier = copies.TorchCopier(0, ordinals, 256 * MiB)
    for streams in (1, 2, 4):
        wanted = copies.copies(tuple(ordinals), (MiB, copier.max_nbytes), (streams,))
        transfers = list(copies.probe_group(0, wanted, copier, TINY, progress := Progress(0)))
        assert progress.notes == []
        assert len(transfers) == len(wanted)
    gpu_buffers = next(iter(copier._gpu_buffers.values()))
    gpu_buffers._host["h2d"].fill_(7)
    first = next(iter(ordinals))
    copier.seconds(copies.Copy(direction="h2d", gpus=(first,), nbytes=MiB, streams=1), 64)
    assert bool((gpu_buffers._device["h2d"][: 64 * MiB] == 7).all())
