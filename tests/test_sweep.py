"""The sweep against its specification, to the bit; and what it refuses."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch

from penstock import _native
from penstock.errors import NonFiniteMasterError, SweepInputError
from penstock.optim import formats, reference, rules
from penstock.optim.rules import Coefficients, RuleName
from penstock.optim.sweep import LEAF, Pool, Segment, grad_stats, start

FLOATS = (torch.bfloat16, torch.float32, torch.float16)
MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
RULES: dict[RuleName, Coefficients] = {
    "adamw": rules.adamw(
        step=3, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, scale=0.3
    ),
    "sgd": rules.sgd(step=2, lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.01, nesterov=True),
    "lion": rules.lion(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
}

State = dict[str, torch.Tensor]


def state_of(n: int, rule: RuleName, weight: torch.dtype, moments: str) -> State:
    torch.manual_seed(5)
    state = {"weight": torch.randn(n).to(weight)}
    if weight == torch.bfloat16:
        state["rest"] = torch.randint(-(2**15), 2**15, (n,), dtype=torch.int16)
    if weight == torch.float16:
        state["rest"] = state["weight"].float()
    for role in ("first", "second")[: rules.NUM_MOMENTS[rule]]:
        state[role] = torch.zeros(n, dtype=MOMENTS[moments])
        if moments == "int8":
            state[f"{role}_base"] = torch.zeros(formats.num_blocks(n), dtype=torch.int16)
    return state


def rough_grad(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Over many octaves, with zeros, denormals of its type and neighbours of overflow."""
    torch.manual_seed(seed)
    grad = torch.randn(n) * torch.exp2(torch.randn(n) * 6)
    grad[::7] = 0
    grad[1::97] = torch.finfo(dtype).tiny * 0.3
    if dtype != torch.float16:
        grad[2::97] = -3e38
    return grad.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def copy_of(state: State) -> State:
    return {role: tensor.clone() for role, tensor in state.items()}


def same(a: State, b: State) -> bool:
    return all(torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a)


def cut(state: State, grad: torch.Tensor, by: Coefficients, at: list[int]) -> list[Segment]:
    """The same tensor as several segments."""
    ends = [*at, grad.numel()]
    segments = []
    for begin, end in zip([0, *at], ends, strict=True):
        parts = {
            role: t[begin // formats.BLOCK : -(-end // formats.BLOCK)]
            if role.endswith("_base")
            else t[begin:end]
            for role, t in state.items()
        }
        segments.append(
            Segment(name="x", by=by, grad=grad[begin:end], first_index=begin, key=77, **parts)
        )
    return segments


@pytest.fixture(scope="module")
def pools() -> dict[int, Pool]:
    return {threads: Pool(threads) for threads in (1, 3)}


# To the bit.


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("grad_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weight", FLOATS, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_every_format_is_the_specification(
    rule: RuleName,
    weight: torch.dtype,
    grad_dtype: torch.dtype,
    moments: str,
    pools: dict[int, Pool],
) -> None:
    n = 2 * LEAF + 701
    wanted = state_of(n, rule, weight, moments)
    got = {isa: copy_of(wanted) for isa in _native.isa_names()}
    for step in (1, 2):
        grad = rough_grad(n, grad_dtype, step)
        refused = reference.sweep(rule, wanted, grad, RULES[rule], key=77)
        for isa, state in got.items():
            ticket = start(rule, cut(state, grad, RULES[rule], []), pool=pools[3], isa=isa)
            if refused is None:
                ticket.wait()
            else:
                with pytest.raises(NonFiniteMasterError) as failed:
                    ticket.wait()
                assert failed.value.index == refused
            assert same(state, wanted), (isa, step)


@pytest.mark.parametrize("moments", MOMENTS)
def test_threads_and_chunks_change_no_bit(moments: str, pools: dict[int, Pool]) -> None:
    n = 20 * LEAF + 5
    grad = rough_grad(n, torch.bfloat16, 1).clamp(-1e3, 1e3)
    by = RULES["adamw"]
    whole = state_of(n, "adamw", torch.bfloat16, moments)
    stats = start("adamw", cut(whole, grad, by, []), pool=pools[1], stats=True).wait()
    for at in ([LEAF], [3 * LEAF, 4 * LEAF, 17 * LEAF], list(range(LEAF, n, LEAF))):
        parts = state_of(n, "adamw", torch.bfloat16, moments)
        again = start("adamw", cut(parts, grad, by, at), pool=pools[3], stats=True).wait()

        assert same(parts, whole)
        assert again == stats


def test_alignment_changes_no_bit(pools: dict[int, Pool]) -> None:
    n = 5000
    grad = rough_grad(n, torch.bfloat16, 1)
    whole = state_of(n, "adamw", torch.bfloat16, "fp32")
    shifted: State = {}
    for role, tensor in whole.items():
        room = torch.empty(n + 3, dtype=tensor.dtype)
        shifted[role] = room[3:].copy_(tensor)
    for state in (whole, shifted):
        start("adamw", cut(state, grad, RULES["adamw"], []), pool=pools[3]).wait()

    assert same(shifted, whole)


def test_segments_of_several_groups_step_as_if_alone(pools: dict[int, Pool]) -> None:
    n = 2000
    plain = rules.adamw(step=1, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    grad = rough_grad(n, torch.bfloat16, 1)
    together = [state_of(n, "adamw", torch.bfloat16, "fp32") for _ in range(2)]
    segments = [
        *cut(together[0], grad, RULES["adamw"], []),
        *cut(together[1], grad.clone(), plain, []),
    ]
    start("adamw", segments, pool=pools[3]).wait()
    for state, by in zip(together, (RULES["adamw"], plain), strict=True):
        alone = state_of(n, "adamw", torch.bfloat16, "fp32")
        reference.sweep("adamw", alone, grad, by, key=77)

        assert same(state, alone)


def test_a_process_that_flushes_denormals_gets_the_same_bits() -> None:
    code = (
        "import torch; torch.set_flush_denormal(True)\n"
        "from penstock.optim import rules; from penstock.optim.sweep import Segment, start\n"
        "w, g = torch.full((64,), 0.0), torch.full((64,), 1e-20)\n"
        "by = rules.sgd(step=1, lr=1e-20, momentum=0.0, dampening=0.0, weight_decay=0.0,"
        " nesterov=False)\n"
        "start('sgd', [Segment(name='w', by=by, grad=g, weight=w)]).wait()\n"
        "print(w.view(torch.int32)[0].item())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    tiny = torch.tensor(1e-20) * torch.tensor(1e-20)
    assert int(run.stdout) == -(2**31) + tiny.view(torch.int32).item() != -(2**31)


# Norm and overflow.


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("isa", _native.isa_names())
def test_stats_are_the_specification(dtype: torch.dtype, isa: str, pools: dict[int, Pool]) -> None:
    for n in (1, 31, LEAF, 7 * LEAF + 1234):
        grad = rough_grad(n, dtype, n)
        for pool in pools.values():
            stats = grad_stats(grad, pool=pool, isa=isa)

            assert stats.sum_squares == reference.sum_squares(grad)
            assert stats.max_abs == float(grad.float().abs().max())
            assert stats.finite


def test_stats_of_parts_add_up_exactly() -> None:
    grad = rough_grad(9 * LEAF, torch.float32, 1)
    parts = [grad_stats(part) for part in (grad[5 * LEAF :], grad[: 2 * LEAF])]
    middle = grad_stats(grad[2 * LEAF : 5 * LEAF])

    assert parts[0] + parts[1] + middle == grad_stats(grad)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_first_bad_element_is_named(bad: float, dtype: torch.dtype) -> None:
    grads = [torch.ones(3 * LEAF, dtype=dtype) for _ in range(3)]
    grads[2][5] = bad
    grads[1][2 * LEAF + 17] = bad
    stats = grad_stats(grads)

    assert stats.first_bad == (1, 2 * LEAF + 17)
    assert not stats.finite
    assert math.isnan(stats.sum_squares)


def test_stats_take_no_memory_that_grows_with_the_gradient() -> None:
    code = (
        "import torch; from penstock.optim.sweep import grad_stats\n"
        "from pathlib import Path\n"
        "def now(key): return int([l for l in Path('/proc/self/status').read_text().splitlines()"
        " if l.startswith(key)][0].split()[1])\n"
        "g = torch.ones(32 << 20); grad_stats(g)\n"
        "Path('/proc/self/clear_refs').write_text('5'); before = now('VmRSS')\n"
        "grad_stats(g); print(now('VmHWM') - before)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if run.returncode and "clear_refs" in run.stderr:
        pytest.skip("the kernel does not let this process reset its peak memory")

    assert int(run.stdout) <= 128  # KiB, for a gradient of 128 MiB


# What is refused, and what it leaves.


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
    "shorter grad": ({"grad": torch.ones(999)}, "weight of layer.weight has 1000 elements .* 999"),
    "longer moment": ({"first": torch.ones(1001)}, "first of layer.weight has 1001 .* 1000"),
    "dtype of grad": ({"grad": torch.ones(1000, dtype=torch.float64)}, "is torch.float64"),
    "dtype of rest": ({"rest": torch.zeros(1000)}, "int16 is needed"),
    "moments differ": ({"second": torch.zeros(1000, dtype=torch.bfloat16)}, "float32 is needed"),
    "no remainder": ({"rest": None}, "rest of layer.weight is missing"),
    "no second": ({"second": None}, "second of layer.weight is missing"),
    "a base too many": ({"first_base": torch.zeros(4, dtype=torch.int16)}, "has no use"),
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


def test_memory_may_not_be_shared() -> None:
    room = torch.zeros(1500)
    with pytest.raises(SweepInputError, match=r"first moment of layer.weight shares memory with s"):
        start("adamw", [segment(first=room[:1000], second=room[500:])])
    one = segment()
    with pytest.raises(SweepInputError, match="shares memory"):
        start("adamw", [one, one])


def test_one_job_takes_one_format() -> None:
    with pytest.raises(SweepInputError, match="one job takes one format"):
        start("adamw", [segment(), segment(grad=torch.ones(1000))])


def test_a_weight_that_would_not_be_finite_is_refused_alone() -> None:
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


def test_an_instruction_set_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no avx1024"):
        start("adamw", [segment()], isa="avx1024")


# Threads.


def test_pools_are_bounded_and_say_so() -> None:
    for threads, nice in ((0, 0), (100_000, 0), (1, 20)):
        with pytest.raises(SweepInputError, match="must be"):
            Pool(threads, nice=nice)
    with pytest.raises(SweepInputError, match="may use"):
        Pool(1, cpus=[4095])
    with pytest.raises(SweepInputError, match="give one"):
        Pool(1, cpus=[0], node=0)


def test_threads_are_confined_and_nice() -> None:
    cpu = min(os.sched_getaffinity(0))
    before = set(os.listdir("/proc/self/task"))
    pool = Pool(2, cpus=[cpu], nice=7)
    start("adamw", [segment()], pool=pool).wait()
    members = set(os.listdir("/proc/self/task")) - before

    assert len(members) == pool.threads == 2
    for member in members:
        assert os.sched_getaffinity(int(member)) == {cpu}
        assert os.getpriority(os.PRIO_PROCESS, int(member)) == 7


def test_a_child_of_fork_gets_threads_of_its_own() -> None:
    start("adamw", [segment()]).wait()
    child = os.fork()
    if child == 0:
        start("adamw", [segment()]).wait()
        os._exit(0)

    assert os.waitpid(child, 0)[1] == 0


def test_tickets_may_be_waited_for_in_any_order() -> None:
    segments = [segment() for _ in range(5)]
    tickets = [start("adamw", [s]) for s in segments]
    for ticket in reversed(tickets):
        assert ticket.wait() is None
        assert ticket.done
    assert all(torch.equal(s.weight, segments[0].weight) for s in segments)


def test_nothing_to_do_is_done() -> None:
    assert start("adamw", []).wait() is None
    assert grad_stats([]).sum_squares == 0.0
