"""Two machines: two network namespaces on this one, with a slow link that loses packets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.engine.transport import SingleRank
from tests.distributed.rank_worker import digests
from tests.distributed.slow_link import WIRE, SlowLink, why_no_link
from tests.equivalence.runs import DRAM

pytestmark = pytest.mark.long


def test_two_machines_give_the_result_of_one_and_notice_a_cut_link(tmp_path: Path) -> None:
    if reason := why_no_link():
        pytest.skip(reason)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    one = json.loads(json.dumps(digests(tmp_path, SingleRank(), (DRAM,))))
    torch.set_num_threads(threads)
    with SlowLink(delay=0.005, loss=0.01) as link:
        processes = [start(link, rank, tmp_path) for rank in (0, 1)]
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "trained\n", process.communicate()[1]
            passed, dropped = link.passed, link.dropped
            link.cut()
            told = [process.communicate(timeout=100) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()

    print(f"{passed} packets passed while they trained, and {dropped} were lost")
    assert dropped > 0
    for rank, (out, err) in enumerate(told):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == one
        assert processes[rank].returncode == 3, err
        lost, host, problem, seconds = json.loads(out)
        print(f"rank {rank} after {seconds:.1f} s in a call: lost rank {lost} on {host}: {problem}")
        assert (lost, host) == (1 - rank, f"machine-{1 - rank}")
        assert "its machine has not been reachable for 5 s" in problem


def start(link: SlowLink, rank: int, folder: Path) -> subprocess.Popen[str]:
    """Start a rank on its machine, which has a host name of its own."""
    worker = [sys.executable, "-m", "tests.distributed.machine_worker", str(rank), "2"]
    command = [*worker, link.addresses[0], "29511", str(folder)]
    named = ["unshare", "--uts", "sh", "-c", f'hostname machine-{rank}; exec "$@"', "sh"]
    return subprocess.Popen(
        link.inside(rank, *named, *command), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=os.environ | {"GLOO_SOCKET_IFNAME": WIRE},
    )  # fmt: skip
