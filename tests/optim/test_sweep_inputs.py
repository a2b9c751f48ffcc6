"""Invalid inputs of the optimizer sweep, refused elements, and its threads."""

from __future__ import annotations

import math
import os
import time

import pytest
import torch

from penstock.errors import NonFiniteMasterError, SweepInputError
from penstock.optim import rules
from penstock.optim.sweep import Pool, Segment, grad_stats, start
from tests.support.sweeps import RULES, state_of


def segment(**changes: object) -> Segment:
    n = 1000
    parts: dict[str, object] = {
        "name": "layer.weight",
        "by": RULES["adamw"],
        "grad": torch.ones(n, dtype=torch.bfloat16),
        **state_of(n, "adamw", torch.bfloat16, "fp32"),
    }
    return Segment(**{**parts, **changes})  # type: ignore[arg-type]


BAD = {
    "shorter grad": ({"grad": torch.ones(999)}, "weight of layer.weight has 1000 elements.* 999"),
    "longer moment": ({"first": torch.ones(1001)}, "first of layer.weight has 1001 .* 1000"),
    "dtype of grad": ({"grad": torch.ones(1000, dtype=torch.float64)}, "is torch.float64"),
    "dtype of rest": ({"rest": torch.zeros(1000)}, "expected int16"),
    "moments differ": ({"second": torch.zeros(1000, dtype=torch.bfloat16)}, "expected float32"),
    "no remainder": ({"rest": None}, "rest of layer.weight is missing"),
    "no second": ({"second": None}, "second of layer.weight is missing"),
    "a base too many": ({"first_base": torch.zeros(4, dtype=torch.int16)}, "is not used"),
    "strided": ({"grad": torch.ones(2000, dtype=torch.bfloat16)[::2]}, "not contiguous"),
    "not on the host": ({"grad": torch.ones(1000, device="meta")}, "on meta; it must be a dense"),
    "between leaves": ({"first_index": 100}, "begins at element 100"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_changes_nothing(name: str) -> None:
    changes, message = BAD[name]
    good, bad = segment(), segment(**changes)
    before = good.weight.clone()
    with pytest.raises(SweepInputError, match=message):
        start("adamw", [good, bad])

    assert torch.equal(good.weight, before)


def test_shared_memory_is_rejected() -> None:
    memory = torch.zeros(1500)
    with pytest.raises(SweepInputError, match=r"first moment of layer.weight shares memory with s"):
        start("adamw", [segment(first=memory[:1000], second=memory[500:])])
    one = segment()
    with pytest.raises(SweepInputError, match="shares memory"):
        start("adamw", [one, one])


def test_segments_of_different_formats_are_rejected() -> None:
    with pytest.raises(SweepInputError, match="all segments of a job must have the same format"):
        start("adamw", [segment(), segment(grad=torch.ones(1000))])


def test_only_elements_that_would_not_be_finite_are_refused() -> None:
    by = rules.sgd(step=1, lr=1e19, momentum=0.0, dampening=0, weight_decay=0, nesterov=False)
    weight = torch.full((100,), 3e38)
    grad = torch.zeros(100)
    grad[40], grad[50] = -1e19, 1e19
    grad[60] = math.inf  # counts as the largest usable gradient
    before = weight.clone()
    with pytest.raises(NonFiniteMasterError, match="first at element 40"):
        start("sgd", [Segment(name="w", by=by, grad=grad, weight=weight)]).wait()

    assert torch.equal(weight[40], before[40])
    assert weight[50] < 2.1e38
    assert torch.isfinite(weight[60])


def test_an_unknown_instruction_set_is_rejected() -> None:
    with pytest.raises(ValueError, match="no avx1024"):
        start("adamw", [segment()], isa="avx1024")


def test_invalid_pools_are_rejected() -> None:
    for threads, nice in ((0, 0), (100_000, 0), (1, 20)):
        with pytest.raises(SweepInputError, match="must be"):
            Pool(threads, nice=nice)
    with pytest.raises(SweepInputError, match="may only use"):
        Pool(1, cpus=[4095])
    with pytest.raises(SweepInputError, match="give one"):
        Pool(1, cpus=[0], node=0)


def test_threads_are_confined_to_cpus_and_nice() -> None:
    cpu = min(os.sched_getaffinity(0))
    before = set(os.listdir("/proc/self/task"))
    pool = Pool(2, cpus=[cpu], nice=7)
    start("adamw", [segment()], pool=pool).wait()
    members = set(os.listdir("/proc/self/task")) - before

    def placement() -> list[tuple[set[int], int]]:
        ids = map(int, members)
        return [(os.sched_getaffinity(i), os.getpriority(os.PRIO_PROCESS, i)) for i in ids]

    assert len(members) == pool.threads == 2
    # A thread confines itself before it starts to work. A thread that came too late for the job
    # may not have done that yet.
    deadline = time.monotonic() + 30
    while placement() != [({cpu}, 7)] * 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert placement() == [({cpu}, 7)] * 2


def test_a_forked_child_gets_its_own_threads() -> None:
    start("adamw", [segment()]).wait()
    child = os.fork()
    if child == 0:
        start("adamw", [segment()]).wait()
        os._exit(0)

    assert os.waitpid(child, 0)[1] == 0


def test_tickets_can_be_waited_for_in_any_order() -> None:
    segments = [segment() for _ in range(5)]
    tickets = [start("adamw", [s]) for s in segments]
    for ticket in reversed(tickets):
        assert ticket.wait() is None
        assert ticket.done()
    assert all(torch.equal(s.weight, segments[0].weight) for s in segments)


def test_an_empty_job_finishes() -> None:
    assert start("adamw", []).wait() is None
    assert grad_stats([]).sum_squares == 0.0
