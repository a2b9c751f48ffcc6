"""The optimizer sweep on the GPU gives the same bits as on the host."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from penstock.errors import NonFiniteMasterError
from penstock.optim import device_sweep, rules, sweep
from penstock.optim.device_backend import DeviceTicket
from penstock.optim.rules import Coefficients
from penstock.optim.sweep import LEAF, Segment
from penstock.units import GiB
from tests.support.device_sweeps import (
    DTYPES,
    INTERPRETED,
    KEY,
    MOMENTS,
    RULES,
    State,
    differing,
    find_device,
    grad_of,
    on_device,
    outcome,
    quiet,
    state_of,
    step_on_device,
    step_on_host,
    to,
)

pytestmark = quiet


@pytest.fixture
def device() -> torch.device:
    return find_device()


def cases() -> list[tuple[str, str, str, str]]:
    """Return rule, weight, gradient and moments: every format of AdamW, some of the others.

    Each is a kernel to compile, or, interpreted, a second to wait: then a spread of all.
    """
    every = [
        (name, weight, grad, moments)
        for name, weight, grad, moments in itertools.product(
            RULES, DTYPES, DTYPES, [*MOMENTS, "none"]
        )
        if (moments != "none" or RULES[name][0] == "sgd")
        and (RULES[name][0] == "adamw" or grad == weight or (weight, grad) == ("bf16", "fp32"))
    ]
    return every[::5] if INTERPRETED else every


@on_device
@pytest.mark.parametrize(("name", "weight", "grad_type", "moments"), cases())
def test_every_format_gives_the_same_bits_as_the_host(
    name: str, weight: str, grad_type: str, moments: str, device: torch.device
) -> None:
    rule, by = RULES[name]
    n = 1725 if INTERPRETED else 5 * LEAF + 701
    host = state_of(n, rule, weight, moments)
    there = to(host, device)
    for step in (1, 2, 3):
        grad = grad_of(n, DTYPES[grad_type], step)
        refused = step_on_host(rule, host, grad, by=by, key=KEY + step)
        refused_there = step_on_device(rule, there, grad.to(device), by=by, key=KEY + step)

        assert refused_there == refused
        assert differing(there, host) == {}, step


@on_device
@pytest.mark.parametrize("n", [1, 2, 16, 255, 256, 257, 1023, 1024, 1025, LEAF + 1])
@pytest.mark.parametrize("moments", MOMENTS)
def test_the_size_changes_no_bit(n: int, moments: str, device: torch.device) -> None:
    host = state_of(n, "adamw", "bf16", moments)
    there = to(host, device)
    grad = torch.randn(n).bfloat16()
    more: Any = {"by": RULES["adamw"][1], "key": KEY}
    step_on_host("adamw", host, grad, **more)
    step_on_device("adamw", there, grad.to(device), **more)

    assert differing(there, host) == {}


@on_device
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_alignment_changes_no_bit(moments: str, device: torch.device) -> None:
    n = 1500
    host = state_of(n, "adamw", "bf16", moments)
    there: State = {}
    for role, tensor in host.items():
        room = torch.empty(n + 3, dtype=tensor.dtype, device=device)
        there[role] = room[3:].copy_(tensor)
    grad = grad_of(n + 1, torch.bfloat16, 1)
    more: Any = {"by": RULES["adamw"][1], "key": KEY}
    step_on_host("adamw", host, grad[1:].clone(), **more)
    step_on_device("adamw", there, grad.to(device)[1:], **more)

    assert differing(there, host) == {}


@on_device
@pytest.mark.parametrize("first_index", [0, LEAF, 2**31, 2**32 - LEAF, 2**32, 2**35 + LEAF])
def test_random_bits_depend_on_the_index_in_the_tensor(
    first_index: int, device: torch.device
) -> None:
    host = state_of(LEAF, "adamw", "bf16", "bf16")
    there = to(host, device)
    grad = torch.randn(LEAF).bfloat16()
    more: Any = {"by": RULES["adamw"][1], "key": KEY, "first_index": first_index}
    step_on_host("adamw", host, grad, **more)
    step_on_device("adamw", there, grad.to(device), **more)

    assert differing(there, host) == {}


@on_device
@pytest.mark.parametrize("moments", MOMENTS)
def test_segments_of_several_groups_and_chunks_give_the_same_bits(
    moments: str, device: torch.device
) -> None:
    plain = rules.adamw(step=1, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    n, grad = LEAF + 300, grad_of(LEAF + 300, torch.bfloat16, 9)
    hosts = [state_of(n, "adamw", "bf16", moments, seed) for seed in (1, 2)]
    theres = [to(host, device) for host in hosts]
    segments = []
    for state, by in zip(theres, (RULES["adamw"][1], plain), strict=True):
        for begin, end in ((0, LEAF), (LEAF, n)):
            parts = {
                role: t[begin // 256 : -(-end // 256)] if "base" in role else t[begin:end]
                for role, t in state.items()
            }
            part = grad[begin:end].to(device)
            more: Any = {"grad": part, "by": by, "key": KEY, "first_index": begin}
            segments.append(Segment(name="x", **more, **parts))
    ticket = device_sweep.start("adamw", segments, stats=True)
    outcome(ticket)
    for host, there, by in zip(hosts, theres, (RULES["adamw"][1], plain), strict=True):
        step_on_host("adamw", host, grad, by=by, key=KEY)

        assert differing(there, host) == {}


@on_device
@pytest.mark.parametrize("moments", MOMENTS)
def test_a_prepared_sweep_takes_the_constants_of_each_step(
    moments: str, device: torch.device
) -> None:
    host = state_of(LEAF + 13, "adamw", "bf16", moments)
    there, grad = to(host, device), torch.empty(LEAF + 13, dtype=torch.bfloat16, device=device)
    segment = Segment(name="x", grad=grad, by=Coefficients(), **there)  # type: ignore[arg-type]
    prepared = device_sweep.PreparedDeviceSweep("adamw", [segment])
    for step in (1, 2, 3):
        by = rules.adamw(step=step, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
        values = grad_of(LEAF + 13, torch.bfloat16, step)
        grad.copy_(values)
        step_on_host("adamw", host, values, by=by, key=step)

        prepared.start([(by, step)]).wait()

        assert differing(there, host) == {}, step


@on_device
def test_results_that_are_fetched_together_are_those_of_each(device: torch.device) -> None:
    """Of sweeps, one of which refuses an element, and of norms, one of which is not finite."""
    by = rules.adamw(step=1, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    huge = rules.adamw(step=1, lr=1e38, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    grads = [grad_of(LEAF * n + 5, torch.bfloat16, n) for n in (1, 2, 3)]
    grads[1][LEAF] = float("inf")
    tickets: list[Any] = []
    for grad, with_rate in zip(grads, (by, huge, by), strict=True):
        state = to(state_of(grad.numel(), "adamw", "fp16", "fp32"), device)
        more: Any = {"grad": grad.nan_to_num().to(device), "by": with_rate}
        tickets.append(device_sweep.start("adamw", [Segment(name="x", **more, **state)]))
        tickets.append(device_sweep.start_stats([grad.to(device), grad[:7].to(device)]))
    wanted = [result_of(ticket) for ticket in tickets]
    assert "refused" in wanted[2]
    assert wanted[3].first_bad == (0, LEAF)
    for ticket in tickets:
        ticket._values = None

    DeviceTicket.fetch_all(tickets)

    assert all(ticket._values is not None for ticket in tickets)
    assert [result_of(ticket) for ticket in tickets] == wanted


def result_of(ticket: Any) -> Any:
    try:
        return ticket.wait()
    except NonFiniteMasterError as error:
        return f"refused: {error}"


@on_device
def test_a_state_may_move_between_host_and_device(device: torch.device) -> None:
    rule, by = RULES["adamw"]
    stays = state_of(2000, rule, "bf16", "int8")
    moves = {role: tensor.clone() for role, tensor in stays.items()}
    for step in range(6):
        grad = (torch.randn(2000) * 10.0**-step).bfloat16()
        step_on_host(rule, stays, grad, by=by, key=step)
        if step % 2:
            step_on_host(rule, moves, grad, by=by, key=step)
        else:
            there = to(moves, device)
            step_on_device(rule, there, grad.to(device), by=by, key=step)
            moves = to(there, torch.device("cpu"))

        assert differing(moves, stays) == {}, step


@on_device
def test_a_learning_rate_of_zero_keeps_the_sign_of_zero(device: torch.device) -> None:
    for name in ("adamw", "sgd", "lion"):
        rule, _ = RULES[name]
        host = state_of(600, rule, "fp32", "fp32")
        host["weight"][::2] = -0.0
        there = to(host, device)
        grad = torch.randn(600)
        step_on_host(rule, host, grad, by=Coefficients(fresh1=0.1, fresh2=0.01))
        step_on_device(rule, there, grad.to(device), by=Coefficients(fresh1=0.1, fresh2=0.01))

        assert differing(there, host) == {}, name


@on_device
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("weight", DTYPES)
def test_plain_torch_on_the_device_gives_the_same_bits(
    weight: str, moments: str, device: torch.device
) -> None:
    for name, (rule, by) in RULES.items():
        host = state_of(3000, rule, weight, moments)
        there = to(host, device)
        grad = grad_of(3000, DTYPES[weight], 1)
        refused = step_on_host(rule, host, grad, by=by, key=KEY)
        refused_there = step_on_device(
            rule, there, grad.to(device), by=by, key=KEY, backend="torch"
        )

        assert refused_there == refused
        assert differing(there, host) == {}, name


@on_device
def test_bad_gradients_are_bounded_or_refused_as_on_the_host(device: torch.device) -> None:
    for name, (rule, by) in RULES.items():
        host = state_of(700, rule, "bf16", "int8")
        there = to(host, device)
        grad = torch.randn(700).bfloat16()
        grad[300], grad[301], grad[450] = math.inf, -math.inf, math.nan
        refused = step_on_host(rule, host, grad, by=by, key=KEY)

        assert refused == step_on_device(rule, there, grad.to(device), by=by, key=KEY) == 450
        assert differing(there, host) == {}, name


@pytest.mark.gpu
def test_more_than_two_billion_elements_are_updated(device: torch.device) -> None:
    n = 2**31 + 8192  # a multiple of the leaf, so that host and device split both ends alike
    # By its size and not by what is free: the test must not be skipped because the card is busy.
    if torch.cuda.get_device_properties(device).total_memory < 24 * GiB:
        pytest.skip("needs a GPU of 24 GiB or more")
    rule, by = RULES["nesterov"]
    there = {
        "weight": torch.zeros(n, dtype=torch.bfloat16, device=device),
        "rest": torch.zeros(n, dtype=torch.int16, device=device),
    }
    grad = torch.zeros(n, dtype=torch.bfloat16, device=device)
    ends = (slice(0, 8192), slice(n - 8192, n))
    hosts = []
    for seed, end in enumerate(ends):
        grad[end] = torch.randn(8192, generator=torch.Generator().manual_seed(seed)).to(grad)
        hosts.append({role: tensor[end].cpu() for role, tensor in there.items()})
        step_on_host(rule, hosts[-1], grad[end].cpu(), by=by)
    step_on_device(rule, there, grad, by=by)

    for host, end in zip(hosts, ends, strict=True):
        assert differing({role: tensor[end] for role, tensor in there.items()}, host) == {}
    both = torch.cat([grad[end].cpu() for end in ends])
    assert device_sweep.grad_stats(grad).units == sweep.grad_stats(both).units
    grad[n - 3] = math.nan
    assert device_sweep.grad_stats(grad).first_bad == (0, n - 3)
