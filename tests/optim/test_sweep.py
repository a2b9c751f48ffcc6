"""The optimizer sweep on the CPU gives the bits of its specification."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from penstock import _native
from penstock.errors import NonFiniteMasterError, SweepInputError
from penstock.optim import reference, rules
from penstock.optim.rules import RuleName
from penstock.optim.sweep import LEAF, Pool, PreparedSweep, grad_stats, start
from tests.support.sweeps import (
    FLOATS,
    MOMENTS,
    RULES,
    State,
    copy_of,
    leaves_of_every_kind,
    rough_grad,
    same,
    split_segments,
    state_of,
)


@pytest.fixture(scope="module")
def pools() -> dict[int, Pool]:
    return {threads: Pool(threads) for threads in (1, 3)}


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("grad_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weight", FLOATS, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_every_format_gives_the_specified_bits(
    rule: RuleName,
    weight: torch.dtype,
    grad_dtype: torch.dtype,
    moments: str,
    pools: dict[int, Pool],
) -> None:
    n = 2 * LEAF + 701
    expected = state_of(n, rule, weight, moments)
    states = {isa: copy_of(expected) for isa in _native.isa_names()}
    for step in (1, 2):
        grad = rough_grad(n, grad_dtype, step)
        refused = reference.sweep(rule, expected, grad, RULES[rule], key=77)
        for isa, state in states.items():
            ticket = start(
                rule, split_segments(state, grad, RULES[rule], []), pool=pools[3], isa=isa
            )
            if refused is None:
                ticket.wait()
            else:
                with pytest.raises(NonFiniteMasterError) as failed:
                    ticket.wait()
                assert failed.value.index == refused
            assert same(state, expected), (isa, step)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("grad_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weight", FLOATS, ids=str)
def test_weights_and_then_moments_give_the_bits_of_one_sweep(
    weight: torch.dtype, grad_dtype: torch.dtype, moments: str, pools: dict[int, Pool]
) -> None:
    n, by = 2 * LEAF + 701, RULES["adamw"]
    expected = state_of(n, "adamw", weight, moments)
    states = {isa: copy_of(expected) for isa in _native.isa_names()}
    for step in (1, 2):
        grad, before = rough_grad(n, grad_dtype, step), copy_of(expected)
        reference.sweep("adamw", expected, grad, by, key=77)
        halfway = {
            role: (before if role.startswith(("first", "second")) else expected)[role]
            for role in before
        }
        for isa, state in states.items():
            segments = split_segments(state, grad, by, [LEAF])
            start("adamw", segments, pool=pools[3], isa=isa, part="weights").wait()
            assert same(state, halfway), (isa, step)
            start("adamw", segments, pool=pools[3], isa=isa, part="moments").wait()
            assert same(state, expected), (isa, step)


@pytest.mark.parametrize("moments", MOMENTS)
def test_refused_elements_keep_their_moments_in_two_sweeps(
    moments: str, pools: dict[int, Pool]
) -> None:
    n, by = LEAF + 13, replace(RULES["adamw"], rate=1e3)
    expected = state_of(n, "adamw", torch.float16, moments)
    expected["rest"][3::50] = 65504.0  # the largest weight, which this step would exceed
    grad = rough_grad(n, torch.bfloat16, 1)
    grad[3::50] = -1.0
    state = copy_of(expected)
    assert reference.sweep("adamw", expected, grad, by, key=77) == 3

    segments = split_segments(state, grad, by, [])
    swept = start("adamw", segments, pool=pools[3], part="weights")
    with pytest.raises(NonFiniteMasterError):
        swept.wait()
    start("adamw", segments, pool=pools[3], part="moments", after_refusal=True).wait()

    assert same(state, expected)


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_prepared_sweep_takes_the_constants_of_each_step(
    moments: str, pools: dict[int, Pool]
) -> None:
    n, grad = LEAF + 13, rough_grad(LEAF + 13, torch.bfloat16, 1)
    expected = state_of(n, "adamw", torch.bfloat16, moments)
    state = copy_of(expected)
    prepared = PreparedSweep("adamw", split_segments(state, grad, RULES["adamw"], [LEAF]))
    for step in (1, 2, 3):
        by = rules.adamw(
            step=step, lr=1e-2 / step, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, scale=step
        )
        grad.copy_(rough_grad(n, torch.bfloat16, step))
        reference.sweep("adamw", expected, grad, by, key=step)

        for part in ("weights", "moments") if step == 3 else ("all",):
            prepared.start([(by, step)] * 2, pool=pools[3], part=part).wait()  # type: ignore[arg-type]

        assert same(state, expected), step


def test_a_prepared_sweep_checks_constants_before_it_sweeps_a_part() -> None:
    state, grad = state_of(64, "adamw", torch.bfloat16, "fp32"), rough_grad(64, torch.bfloat16, 1)
    prepared = PreparedSweep("adamw", split_segments(state, grad, RULES["adamw"], []))
    by = replace(RULES["adamw"], l2=0.1)

    with pytest.raises(SweepInputError, match="sweep all of it at once"):
        prepared.start([(by, 1)], part="weights")


def test_only_adamw_without_l2_can_be_swept_in_two_parts() -> None:
    state, grad = state_of(64, "lion", torch.bfloat16, "fp32"), rough_grad(64, torch.bfloat16, 1)
    with pytest.raises(SweepInputError, match="only AdamW"):
        start("lion", split_segments(state, grad, RULES["lion"], []), part="weights")
    state = state_of(64, "adamw", torch.bfloat16, "fp32")
    by = replace(RULES["adamw"], l2=0.1)
    with pytest.raises(SweepInputError, match="sweep all of it at once"):
        start("adamw", split_segments(state, grad, by, []), part="moments")


@pytest.mark.parametrize("moments", MOMENTS)
def test_threads_and_chunks_change_no_bit(moments: str, pools: dict[int, Pool]) -> None:
    n = 20 * LEAF + 5
    grad = rough_grad(n, torch.bfloat16, 1).clamp(-1e3, 1e3)
    by = RULES["adamw"]
    whole = state_of(n, "adamw", torch.bfloat16, moments)
    stats = start("adamw", split_segments(whole, grad, by, []), pool=pools[1], stats=True).wait()
    for at in ([LEAF], [3 * LEAF, 4 * LEAF, 17 * LEAF], list(range(LEAF, n, LEAF))):
        parts = state_of(n, "adamw", torch.bfloat16, moments)
        again = start(
            "adamw", split_segments(parts, grad, by, at), pool=pools[3], stats=True
        ).wait()

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
        start("adamw", split_segments(state, grad, RULES["adamw"], []), pool=pools[3]).wait()

    assert same(shifted, whole)


def test_segments_of_several_groups_do_not_affect_each_other(pools: dict[int, Pool]) -> None:
    n = 2000
    plain = rules.adamw(step=1, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    grad = rough_grad(n, torch.bfloat16, 1)
    together = [state_of(n, "adamw", torch.bfloat16, "fp32") for _ in range(2)]
    segments = [
        *split_segments(together[0], grad, RULES["adamw"], []),
        *split_segments(together[1], grad.clone(), plain, []),
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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("isa", _native.isa_names())
def test_stats_equal_the_specification(
    dtype: torch.dtype, isa: str, pools: dict[int, Pool]
) -> None:
    for n in (1, 31, LEAF, 7 * LEAF + 1234):
        grad = rough_grad(n, dtype, n)
        for pool in pools.values():
            stats = grad_stats(grad, pool=pool, isa=isa)

            assert stats.sum_squares == reference.sum_squares(grad)
            assert stats.max_abs == float(grad.float().abs().max())
            assert stats.finite


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("isa", _native.isa_names())
def test_every_kind_of_leaf_has_the_specified_sum(dtype: torch.dtype, isa: str) -> None:
    grad = leaves_of_every_kind(dtype)
    expected = reference.leaf_sums(grad).tolist()
    states = [grad_stats(leaf, isa=isa) for leaf in grad.split(LEAF)]

    assert [leaf.sum_squares for leaf in states] == expected
    assert grad_stats(grad, isa=isa) == sum(states[1:], states[0])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_norm_is_accurate_to_half_a_bit_of_fp32(dtype: torch.dtype) -> None:
    for leaf in leaves_of_every_kind(dtype).split(LEAF):
        exact = math.fsum(x * x for x in leaf.tolist())
        # At most two roundings in fp32, and the loss of squares that fp32 cannot represent.
        assert abs(grad_stats(leaf).sum_squares - exact) <= 2.0**-23 * exact


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


def test_stats_need_a_constant_amount_of_memory() -> None:
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
