"""A run's memory stays within its plan plus an idle process plus 200 MiB; a cgroup enforces it.

It also stays within the plan's own figure for the host memory of the whole process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.units import GiB, MiB
from tests.faults.test_placement_faults import memory_group

REPO = Path(__file__).parents[2]
SPARE = 200 * MiB

CHILD = """
import json, sys
from pathlib import Path
import torch, transformers
import penstock.engine.prepare, penstock.engine.engine
from penstock.tiers import Tier
from tests.support import engines
from tests.equivalence.runs import Setup, Way

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(l.split()[1]) << 10 for l in lines if l.startswith("VmHWM:"))

def report(**values):
    print(json.dumps(values), flush=True)

torch.set_num_threads(2)
transformers.LlamaConfig, transformers.LlamaForCausalLM  # naming them imports their modules
report(bare=peak())
way = Way("child", tuple(sys.argv[2].split(",")), {"piece": 1 << 20})
shape = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8,
             num_key_value_heads=4, head_dim=64, vocab_size=8000, max_position_embeddings=2048)
config = engines.tiny_config("llama", **shape)
context, batch = int(sys.argv[3]), int(sys.argv[4])
work = engines.workload(context=context, batch=batch, micro_batch=1, loss_chunk=1024)
setup = Setup(config, engines.inventory(config), work, None)
plan = setup.plan(way, Path(sys.argv[1]))
report(plan={tier.value: plan.peak(tier) for tier in Tier}, host=plan.host_nbytes)
sys.stdin.readline()
engine = engines.make_engine(setup.config, plan, setup.model, None)
losses = [float(engine.step(rows)) for rows in setup.batches(batch)]
engine.finish()
engine.close()
report(losses=losses, peak=peak())
"""


@contextlib.contextmanager
def limited() -> Iterator[tuple[list[str], Any]]:
    """Yield a command prefix, and a function that limits the memory of processes started with it.

    Without the right to create a cgroup there is no limit, but the process still measures itself.
    """
    if os.geteuid() != 0:
        yield [], lambda limit: None
        return
    with memory_group(1 << 40) as join:
        group = Path(join[2].split('"')[1]).parent
        names = ("memory.max", "memory.limit_in_bytes")
        (file,) = (group / name for name in names if (group / name).exists())
        yield join, lambda limit: file.write_text(str(limit))


def run_within(disk: Path, spots: str, context: int, batch: int) -> tuple[int, int]:
    """Run the child; return its peak memory, and the lower of its limit and its plan."""
    with (
        limited() as (join, limit),
        subprocess.Popen(
            [*join, sys.executable, "-c", CHILD, str(disk), spots, str(context), str(batch)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPO,
        ) as child,
    ):  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        bare = json.loads(child.stdout.readline())["bare"]
        promised = json.loads(child.stdout.readline())
        plan, host = promised["plan"], promised["host"]
        planned = sum(nbytes for tier, nbytes in plan.items() if tier != "nvme")
        allowed = bare + planned + SPARE
        limit(allowed)
        child.stdin.write("go\n")
        child.stdin.close()
        line = child.stdout.readline()
        assert child.wait() == 0, f"exit code {child.returncode}, limit {allowed >> 20} MiB"
    assert 100 * MiB < planned < GiB, plan
    return json.loads(line)["peak"], min(allowed, host)


BUDGETS = {
    "everything in HBM": "hhhh",
    "everything in DRAM": "dddd",
    "everything on disk": "nnnn",
}


@pytest.mark.long  # tests/engine/test_memory_usage.py compares a small process with its plan
def test_peak_memory_stays_within_the_plan_with_everything_on_disk(tmp_path: Path) -> None:
    peak, allowed = run_within(tmp_path, "nnnn", context=512, batch=1)

    assert peak <= allowed


@pytest.mark.long
@pytest.mark.parametrize("spots", BUDGETS.values(), ids=BUDGETS)
def test_peak_memory_stays_within_the_plan_under_every_budget(spots: str, tmp_path: Path) -> None:
    peak, allowed = run_within(tmp_path, spots, context=1024, batch=2)

    assert peak <= allowed
