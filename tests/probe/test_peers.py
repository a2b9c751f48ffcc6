"""Copies from GPU to GPU over simulated links; one test needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.machine.machine import Gpu, GpuLink, Machine
from penstock.machine.sysfs import System
from penstock.probe import copies, peers, session
from penstock.probe.measurement import Progress
from penstock.probe.session import ProbeOptions, Session
from tests.support.probing import NODE, TINY, make_tiny

PAIR = GpuLink(gpus=(0, 1), kind="nvlink")


class FakePeers:
    """GPUs that send 300 GB/s each."""

    def __init__(self, gpus=(), ordinals=None):
        self.gpus = gpus

    def seconds(self, count):
        return count * peers.NBYTES / 300e9


class Hidden:
    def __init__(self, gpus, ordinals):
        raise RuntimeError("peer access is not supported")


def test_the_rate_of_a_link_is_what_each_gpu_sends():
    measured = peers.probe_link(PAIR, FakePeers(), TINY, Progress(1))
    assert measured.bytes_per_second is not None
    assert measured.bytes_per_second.median == pytest.approx(300e9)
    assert measured.bytes_per_second.samples


def run_session(monkeypatch, links, copier):
    """Probe the links of a machine with three GPUs."""
    make_tiny(monkeypatch)
    monkeypatch.setattr(copies, "cuda_ordinals", lambda gpus: {g.index: g.index for g in gpus})
    monkeypatch.setattr(peers, "TorchPeerCopier", copier)
    box = Machine(nodes=(NODE,), gpus=tuple(Gpu(index=i) for i in range(3)), gpu_links=links)
    probing = Session(box, ProbeOptions(quick=True, nodes=()), System())
    progress = Progress(peers.figures(links))
    return probing._probe_links(TINY, progress), progress


def test_a_probe_measures_links_with_peer_access_and_counts_them(monkeypatch):
    links = (PAIR, GpuLink(gpus=(0, 2), kind="none"), GpuLink(gpus=(1, 2), kind="pcie"))
    found, progress = run_session(monkeypatch, links, FakePeers)
    assert [link.bytes_per_second is not None for link in found] == [True, False, True]
    assert [replace(link, bytes_per_second=None) for link in found] == list(links)
    assert progress.done == peers.figures(links) == 2


def test_a_link_that_cannot_be_measured_stays_with_a_note(monkeypatch):
    found, progress = run_session(monkeypatch, (PAIR,), Hidden)
    assert found == (PAIR,)
    assert progress.done == 1
    assert progress.notes == [
        "GPU 0, 1: copies to each other over nvlink: not measured: peer access is not supported"
    ]


def test_a_machine_without_links_measures_none(monkeypatch):
    assert run_session(monkeypatch, (), Hidden)[0] == ()


def test_the_gpus_must_be_visible():
    pytest.importorskip("torch")
    with pytest.raises(session.ProbeError, match="CUDA does not list GPU 5"):
        peers.TorchPeerCopier((0, 5), {0: 0})


@pytest.mark.gpu
def test_real_copies_from_gpu_to_gpu_arrive():
    # With one GPU this copies within its memory; with several, from each to the next one.
    from penstock.machine.discovery import discover

    ordinals = copies.cuda_ordinals(discover().gpus)
    gpus = [*ordinals, *ordinals][: max(2, len(ordinals))]
    copier = peers.TorchPeerCopier(gpus, ordinals)
    for _, received, sent in copier._steps:
        sent.fill_(7)
        received.fill_(0)
    assert copier.seconds(2) > 0
    assert all(bool((received == 7).all()) for _, received, _ in copier._steps)
