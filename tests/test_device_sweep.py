"""The GPU's sweep against the host's, to the bit.

Without a GPU the same promises are kept by Triton's interpreter, in a process of its own, since
Triton decides when it is imported whether it compiles or interprets; and the code it would compile
is read.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from penstock.errors import NonFiniteMasterError, SweepInputError
from penstock.optim import device_sweep, formats, rules, sweep
from penstock.optim.rules import Coefficients, RuleName
from penstock.optim.sweep import LEAF, Segment

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None

on_device = pytest.mark.skipif(False, reason="") if INTERPRETED else pytest.mark.gpu
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton.*"),
    # numpy, of infinities that are meant
    *([pytest.mark.filterwarnings("ignore::RuntimeWarning")] if INTERPRETED else []),
]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
RULES: dict[str, tuple[RuleName, Coefficients]] = {
    "adamw": (
        "adamw",
        rules.adamw(step=3, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, scale=0.3),
    ),
    "adam-l2": (
        "adamw",
        rules.adamw(
            step=1, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decoupled=False
        ),
    ),
    "sgd": (
        "sgd",
        rules.sgd(step=2, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01, nesterov=False),
    ),
    "nesterov": (
        "sgd",
        rules.sgd(step=2, lr=0.1, momentum=0.9, dampening=0, weight_decay=0.01, nesterov=True),
    ),
    "lion": ("lion", rules.lion(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, scale=-2.0)),
}
KEY = rules.draw_key(1, 2, 3) | 1 << 63 | 1 << 31
"""Both halves are negative as 32-bit numbers."""

State = dict[str, torch.Tensor]


@pytest.fixture
def device() -> torch.device:
    if INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


# Hard cases.


def hard_floats(n: int, seed: int) -> torch.Tensor:
    """fp32: random bit patterns, all octaves alike; zeros of both signs, denormals, ties, ends."""
    torch.manual_seed(seed)
    value = torch.randn(n)
    wild = torch.randint(-(2**31), 2**31 - 1, (n,), dtype=torch.int32).view(torch.float32)
    wild = torch.where(wild.isfinite() & (wild.abs() < 1e30), wild, value)
    value = torch.where(torch.rand(n) < 0.5, value, wild)
    ends = [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 3e38, -3e38, 1.00390625, 1.01171875, -1.0]
    for i, end in enumerate(ends):
        value[i :: 10 * len(ends)] = end
    return value


def as_type(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    top = torch.finfo(dtype).max
    return value.clamp(-top, top).to(dtype)


def grad_of(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    grad = hard_floats(n, seed)
    if dtype == torch.float16:
        # as a loss scale would have it: mostly inside fp16's narrow range, denormals included
        grad = torch.where(grad.abs() > 1e6, grad.sign(), grad)
        grad[5::17] *= 2.0**-20
    return as_type(grad, dtype)


def state_of(n: int, rule: RuleName, weight: str, moments: str, seed: int = 5) -> State:
    master = hard_floats(n, seed).clamp(-1e4, 1e4)
    state: State = {}
    if weight == "bf16":
        state["weight"], state["rest"] = formats.split(master)
    else:
        state["weight"] = as_type(master, DTYPES[weight])
    if weight == "fp16":
        state["rest"] = master
    for i, role in enumerate(("first", "second")[: rules.NUM_MOMENTS[rule]]):
        if moments == "none":
            continue
        value = hard_floats(n, seed + 1 + i).clamp(-1e9, 1e9)
        stored = formats.write_moment(
            value.abs() if role == "second" else value,
            role,
            moments,  # type: ignore[arg-type]
            second=role == "second",
        )
        state |= {name.removesuffix("_code"): tensor for name, tensor in stored.items()}
    return state


def to(state: State, device: torch.device) -> State:
    return {role: tensor.to(device, copy=True) for role, tensor in state.items()}


def differing(a: State, b: State) -> dict[str, int]:
    """How many bytes of each role differ; empty if none does."""
    found = {
        role: int((a[role].cpu().view(torch.uint8) != b[role].cpu().view(torch.uint8)).sum())
        for role in a
    }
    return {role: count for role, count in found.items() if count}


def step_on_host(rule: RuleName, state: State, grad: torch.Tensor, **more: Any) -> int | None:
    return outcome(sweep.start(rule, [Segment(name="x", grad=grad, **state, **more)]))


def step_on_device(rule: RuleName, state: State, grad: torch.Tensor, **more: Any) -> int | None:
    engine = more.pop("engine", None)
    segments = [Segment(name="x", grad=grad, **state, **more)]
    return outcome(device_sweep.start(rule, segments, engine=engine))


def outcome(ticket: Any) -> int | None:
    """The first refused element, if there is one."""
    try:
        ticket.wait()
    except NonFiniteMasterError as refused:
        return refused.index
    return None


def cases() -> list[tuple[str, str, str, str]]:
    """Rule, weight, gradient and moments: all of AdamW's, and a spread of the others'.

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


# To the bit.


@on_device
@pytest.mark.parametrize(("name", "weight", "grad_type", "moments"), cases())
def test_every_format_gives_the_hosts_bits(
    name: str, weight: str, grad_type: str, moments: str, device: torch.device
) -> None:
    rule, by = RULES[name]
    n = 1725 if INTERPRETED else 5 * LEAF + 701
    host = state_of(n, rule, weight, moments)
    there = to(host, device)
    for step in (1, 2, 3):
        grad = grad_of(n, DTYPES[grad_type], step)
        refused = step_on_host(rule, host, grad, by=by, key=KEY + step)
        got = step_on_device(rule, there, grad.to(device), by=by, key=KEY + step)

        assert got == refused
        assert differing(there, host) == {}, step


@on_device
@pytest.mark.parametrize("n", [1, 2, 16, 255, 256, 257, 1023, 1024, 1025, LEAF + 1])
@pytest.mark.parametrize("moments", MOMENTS)
def test_sizes_change_no_bit(n: int, moments: str, device: torch.device) -> None:
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
def test_draws_depend_on_the_place_in_the_tensor(first_index: int, device: torch.device) -> None:
    host = state_of(LEAF, "adamw", "bf16", "bf16")
    there = to(host, device)
    grad = torch.randn(LEAF).bfloat16()
    more: Any = {"by": RULES["adamw"][1], "key": KEY, "first_index": first_index}
    step_on_host("adamw", host, grad, **more)
    step_on_device("adamw", there, grad.to(device), **more)

    assert differing(there, host) == {}


@on_device
@pytest.mark.parametrize("moments", MOMENTS)
def test_segments_of_several_groups_and_chunks(moments: str, device: torch.device) -> None:
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
def test_a_state_may_move_between_sides(device: torch.device) -> None:
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
def test_a_learning_rate_of_zero_keeps_zeros_signs(device: torch.device) -> None:
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
        got = step_on_device(rule, there, grad.to(device), by=by, key=KEY, engine="torch")

        assert got == refused
        assert differing(there, host) == {}, name


@on_device
def test_bad_gradients_are_bounded_or_refused_alike(device: torch.device) -> None:
    for name, (rule, by) in RULES.items():
        host = state_of(700, rule, "bf16", "int8")
        there = to(host, device)
        grad = torch.randn(700).bfloat16()
        grad[300], grad[301], grad[450] = math.inf, -math.inf, math.nan
        refused = step_on_host(rule, host, grad, by=by, key=KEY)

        assert refused == step_on_device(rule, there, grad.to(device), by=by, key=KEY) == 450
        assert differing(there, host) == {}, name


@pytest.mark.gpu
def test_more_than_two_billion_elements(device: torch.device) -> None:
    n = 2**31 + 5000
    if torch.cuda.mem_get_info()[0] < 8 * n:
        pytest.skip("needs 8 bytes of GPU memory an element, 16 GiB in all")
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
    assert device_sweep.grad_stats(grad).sum_squares == pytest.approx(
        sweep.grad_stats(both).sum_squares, rel=1e-12
    )
    grad[n - 3] = math.nan
    assert device_sweep.grad_stats(grad).first_bad == (0, n - 3)


# Norm and overflow.


@on_device
@pytest.mark.parametrize("engine", ["triton", "torch"])
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("n", [1, 33, LEAF, 9 * LEAF + 1234])
def test_stats_are_the_hosts(n: int, kind: str, engine: Any, device: torch.device) -> None:
    grad = grad_of(n, DTYPES[kind], n)

    assert device_sweep.grad_stats(grad.to(device), engine=engine) == sweep.grad_stats(grad)


@on_device
def test_stats_of_many_leaves(device: torch.device) -> None:
    n = 20 * LEAF + 7 if INTERPRETED else 3000 * LEAF + 7
    grad = (torch.randn(n) * torch.exp2(torch.randn(n) * 8)).bfloat16()

    assert device_sweep.grad_stats(grad.to(device)) == sweep.grad_stats(grad)


@on_device
@pytest.mark.parametrize("engine", ["triton", "torch"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", DTYPES)
def test_the_first_bad_element_is_named(
    bad: float, kind: str, engine: Any, device: torch.device
) -> None:
    grads = [grad_of(3 * LEAF, DTYPES[kind], seed) for seed in range(3)]
    grads[2][5] = bad
    grads[1][2 * LEAF + 17 :: 100] = bad
    host = sweep.grad_stats(grads)
    there = device_sweep.grad_stats([grad.to(device) for grad in grads], engine=engine)

    assert there.first_bad == host.first_bad == (1, 2 * LEAF + 17)
    assert there.units == host.units
    assert str(there.max_abs) == str(host.max_abs)


@on_device
def test_a_step_brings_stats_if_asked(device: torch.device) -> None:
    grad = torch.randn(5000).bfloat16()
    state = to(state_of(5000, "adamw", "bf16", "fp32"), device)
    one = Segment(name="x", by=RULES["adamw"][1], grad=grad.to(device), **state)
    ticket = device_sweep.start("adamw", [one], stats=True)

    assert ticket.wait() == sweep.grad_stats(grad) == ticket.wait()
    assert ticket.done


# What is refused, and what it leaves.


def segment(device: torch.device, **changes: Any) -> Segment:
    state = to(state_of(1000, "adamw", "bf16", "fp32"), device)
    grad = torch.ones(1000, dtype=torch.bfloat16, device=device)
    parts: dict[str, Any] = {"name": "layer", "by": Coefficients(), "grad": grad, **state}
    return Segment(**{**parts, **changes})


BAD = {
    "shorter grad": ({"grad": torch.ones(999)}, "weight of layer has 1000 elements .* 999"),
    "dtype of grad": ({"grad": torch.ones(1000, dtype=torch.float64)}, "is torch.float64"),
    "dtype of rest": ({"rest": torch.zeros(1000)}, "int16 is needed"),
    "moments differ": ({"second": torch.zeros(1000).bfloat16()}, "float32 is needed"),
    "no remainder": ({"rest": None}, "rest of layer is missing"),
    "no second": ({"second": None}, "second of layer is missing"),
    "a base too many": ({"first_base": torch.zeros(4, dtype=torch.int16)}, "has no use"),
    "strided": ({"grad": torch.ones(2000).bfloat16()[::2]}, "not contiguous"),
    "between leaves": ({"first_index": 100}, "begins at element 100"),
}


@on_device
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_changes_nothing(name: str, device: torch.device) -> None:
    changes, message = BAD[name]
    there = {}
    for role, value in changes.items():
        there[role] = value
        if isinstance(value, torch.Tensor):
            step = 2 if name == "strided" else 1
            there[role] = torch.zeros(value.numel() * step).to(device, value.dtype)[::step]
    good, bad = segment(device), segment(device, **there)
    before = good.weight.clone()
    with pytest.raises(SweepInputError, match=message):
        device_sweep.start("adamw", [good, bad])

    assert torch.equal(good.weight, before)


@on_device
def test_memory_may_not_be_shared(device: torch.device) -> None:
    room = torch.zeros(1500, device=device)
    with pytest.raises(SweepInputError, match="shares memory with first of layer"):
        device_sweep.start("adamw", [segment(device, first=room[:1000], second=room[500:])])
    one = segment(device)
    with pytest.raises(SweepInputError, match="shares memory"):
        device_sweep.start("adamw", [one, one])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes host tensors")
def test_a_host_tensor_is_refused() -> None:
    with pytest.raises(SweepInputError, match="on cpu; it must be a dense cuda tensor"):
        device_sweep.start("adamw", [segment(torch.device("cpu"))])
    with pytest.raises(SweepInputError, match="on cpu; it must be a dense cuda tensor"):
        device_sweep.grad_stats(torch.ones(5))


def test_nothing_to_do_is_done() -> None:
    assert device_sweep.start("adamw", []).wait() is None
    assert device_sweep.grad_stats([]).sum_squares == 0.0


# Without a GPU.


@pytest.mark.skipif(INTERPRETED, reason="this is it")
@needs_triton
@pytest.mark.timeout(900)
def test_the_interpreter_keeps_every_promise() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-m", "not gpu"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(run.stdout[-3000:], run.stderr[-1000:])

    assert run.returncode == 0
    assert int(re.findall(r"(\d+) passed", run.stdout)[-1]) > 100


def test_without_triton_torch_takes_over_and_says_so() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from penstock.optim import device_engine\n"
        "print(device_engine.pick())\n"
        "try: device_engine.pick('triton')\n"
        "except ValueError as refused: print(refused)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.startswith("torch\n")
    assert "pip install triton" in run.stdout


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> str:
    """PTX for Hopper, by Triton's compiler alone."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, t in enumerate(types.values()) if t.startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"enable_fp_fusion": False, "num_warps": 4}
    ptx: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return ptx


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@needs_triton
@pytest.mark.parametrize(
    ("rule", "grad", "master", "moments"),
    [
        ("adamw", "bf16", "split", "fp32"),
        ("adamw", "fp16", "half", "bf16"),
        ("adamw", "fp32", "single", "int8"),
        ("sgd", "bf16", "split", "none"),
        ("lion", "bf16", "split", "int8"),
    ],
)
@pytest.mark.parametrize("count", ["i32", "i64", "1"])
def test_compiled_code_rounds_once(
    rule: str, grad: str, master: str, moments: str, count: str
) -> None:
    from penstock.optim import device_kernels

    g = "*fp32" if grad == "fp32" else "*i16"
    m = {"fp32": "*fp32", "bf16": "*i16", "int8": "*u8", "none": g}[moments]
    types = {"grad": g, "weight": "*fp32" if master == "single" else "*i16"}
    types |= {"rest": "*fp32" if master == "half" else "*i16", "first": m, "second": m}
    types |= {"first_base": "*i16", "second_base": "*i16", "refused": "*i64", "n": count}
    types |= dict.fromkeys(("first_index", "key0", "key1"), "i32")
    numbers = ("scale", "l2", "decay", "rate", "fresh1", "fresh2", "eps", "keep")
    types |= dict.fromkeys(numbers, "fp32")
    constants = {"RULE": rule, "LOOK": True, "GRAD": grad, "MASTER": master}
    constants |= {"LIMIT": 0x7F7FFFFF, "MOMENTS": moments, "ROWS": 4, "PTX": True}
    if count == "1":
        types["n"] = "constexpr"
        constants["n"] = 1
    ptx = compiled(device_kernels.sweep_kernel, types, constants)
    arithmetic = set(re.findall(r"\b((?:mul|add|sub|div|sqrt|fma|mad)\.[a-z.]*f32)\b", ptx))

    assert arithmetic <= {"mul.rn.f32", "add.rn.f32", "sub.rn.f32", "div.rn.f32", "sqrt.rn.f32"}
    assert {"mul.rn.f32", "add.rn.f32"} <= arithmetic
    assert ".ftz" not in ptx
    assert ".approx" not in ptx
    assert "fma." not in ptx


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@needs_triton
@pytest.mark.parametrize("grad", DTYPES)
def test_compiled_norm_compiles(grad: str) -> None:
    from penstock.optim import device_norm

    types = {"grad": "*fp32" if grad == "fp32" else "*i16", "leaf_sums": "*fp64"}
    types |= {"top_bits": "*i64", "first_bad": "*i64", "n": "i64"}
    ptx = compiled(device_norm.leaf_kernel, types, {"GRAD": grad, "LEAVES": 8})
    limbs = {"leaf_sums": "*fp64", "limbs": "*i64", "num_leaves": "i32"}

    assert ".ftz" not in ptx
    assert "atom" in compiled(device_norm.limb_kernel, limbs, {"LEAVES": 128})
