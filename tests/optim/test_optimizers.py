"""The optimizers behave like those in torch.optim, except for speed, size and rounding error."""

from __future__ import annotations

import copy
import inspect
import math

import pytest
import torch

from penstock.errors import NonFiniteGradientError, NonFiniteMasterError, SweepInputError
from penstock.optim import SGD, AdamW, Lion, formats
from penstock.optim.reference import gradient
from penstock.optim.rules import Coefficients
from tests.optim.test_against_torch import N, alternating_grads, random_grads, run


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 33), torch.nn.LayerNorm(33), torch.nn.Linear(33, 5)
    ).bfloat16()


def groups_of(net: torch.nn.Module) -> list[dict]:
    params = list(net.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0, "lr": 1e-3},
    ]


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        net(torch.randn(8, 20, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_a_resumed_run_gives_the_same_result(moments: formats.Moments) -> None:
    uninterrupted, interrupted = model(), model()
    first = AdamW(groups_of(uninterrupted), lr=1e-2, moments=moments, seed=4)
    train(uninterrupted, first, range(10))
    before = AdamW(groups_of(interrupted), lr=1e-2, moments=moments, seed=4)
    train(interrupted, before, range(5))
    saved = copy.deepcopy((interrupted.state_dict(), before.state_dict()))
    resumed = model()
    resumed.load_state_dict(saved[0])
    after = AdamW(groups_of(resumed), lr=1.0, moments=moments, seed=99)
    after.load_state_dict(saved[1])
    train(resumed, after, range(5, 10))

    for a, b in zip(uninterrupted.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in first.state[a].items():
            assert torch.equal(value, after.state[b][key]), key
    assert [g["lr"] for g in after.param_groups] == [1e-2, 1e-3]


def test_states_can_be_loaded_into_torch_and_back() -> None:
    params = [torch.linspace(-1, 1, N).requires_grad_() for _ in range(3)]
    ours, theirs = AdamW([params[0]], lr=1e-2), torch.optim.AdamW([params[1]], lr=1e-2)
    run(ours, params[0], alternating_grads, 5)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    params[1].data.copy_(params[0].data)
    run(theirs, params[1], random_grads, 5)
    back = AdamW([params[2]], lr=9.0)
    params[2].data.copy_(params[0].data)
    again = torch.optim.AdamW([params[0]], lr=1e-2)
    again.load_state_dict(ours.state_dict())
    back.load_state_dict(again.state_dict())
    run(back, params[2], random_grads, 5)

    assert torch.allclose(params[1], params[2], rtol=1e-5, atol=1e-6)
    assert back.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("to", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("since", ["fp32", "bf16", "int8"])
def test_moments_are_converted_on_load(since: formats.Moments, to: formats.Moments) -> None:
    param = torch.linspace(-1, 1, N).bfloat16().requires_grad_()
    old = AdamW([param], moments=since)
    run(old, param, alternating_grads, 5)
    new = AdamW([param], moments=to)
    new.load_state_dict(old.state_dict())
    before, after = old.state[param], new.state[param]

    assert torch.equal(after["low"], before["low"])
    assert after["step"] == 5
    for name, second in (("exp_avg", False), ("exp_avg_sq", True)):
        exact = formats.read_moment(before, name, second=second)
        assert torch.allclose(
            formats.read_moment(after, name, second=second), exact, rtol=0.07, atol=0
        )
    run(new, param, alternating_grads, 1)


def test_states_have_the_documented_size() -> None:
    param = torch.zeros(100, 256, dtype=torch.bfloat16).requires_grad_()
    for moments, expected in (("fp32", 12), ("bf16", 8), ("int8", 6 + 4 / 256)):
        optimizer = AdamW([param], moments=moments)  # type: ignore[arg-type]
        run(optimizer, param, lambda _: torch.ones(100, 256), 1)
        state_bytes = sum(t.nbytes for k, t in optimizer.state[param].items() if k != "step")

        assert (state_bytes + param.nbytes) / param.numel() == expected


def test_groups_can_be_added_and_parameters_named() -> None:
    net = model()
    optimizer = AdamW([("head", next(net.parameters()))], lr=1e-2)
    optimizer.add_param_group({"params": [("tail", p) for p in list(net.parameters())[-1:]]})
    next(net.parameters()).grad = torch.full((33, 20), math.nan, dtype=torch.bfloat16)

    assert len(optimizer.param_groups) == 2
    with pytest.raises(NonFiniteGradientError, match="gradient of head"):
        optimizer.step()


def test_a_closure_is_called_with_gradients_enabled() -> None:
    param = torch.ones(5).requires_grad_()
    optimizer = SGD([param], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = param.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 5.0
    assert torch.allclose(param, torch.full((5,), 0.9))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_changes_nothing_unless_trusted(bad: float) -> None:
    net = model()
    optimizer = AdamW(net.parameters())
    train(net, optimizer, range(2))
    params = list(net.parameters())
    assert params[3].grad is not None
    params[3].grad[7] = bad
    before = copy.deepcopy([(p.detach(), optimizer.state[p]) for p in params])
    with pytest.raises(NonFiniteGradientError, match="first at element 7") as failed:
        optimizer.step()

    assert failed.value.index == 7
    for param, (weight, state) in zip(params, before, strict=True):
        assert torch.equal(param, weight)
        assert all(torch.equal(optimizer.state[param][k], v) for k, v in state.items())
    optimizer.nonfinite = "trust"
    if math.isnan(bad):
        with pytest.raises(NonFiniteMasterError, match="first at element 7"):
            optimizer.step()
        assert torch.equal(params[3][7], before[3][0][7])
    else:
        optimizer.step()
    assert not torch.equal(params[3][6], before[3][0][6])
    assert all(bool(torch.isfinite(p).all()) for p in params)


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (torch.ones(4, dtype=torch.float64), "float64"),
        (torch.ones(4, 4).t()[:, :2], "not contiguous"),
        (torch.ones(4, device="meta"), "on meta"),
    ],
)
def test_unsupported_parameters_are_rejected(param: torch.Tensor, message: str) -> None:
    good = AdamW([torch.ones(3).requires_grad_()])
    with pytest.raises(SweepInputError, match=message):
        good.add_param_group({"params": [param.requires_grad_()]})
    named = AdamW([("good", torch.ones(3).requires_grad_())])
    with pytest.raises(SweepInputError, match=message):
        named.add_param_group({"params": [("bad", param)]})

    assert len(good.param_groups) == len(named.param_groups) == 1


def test_unsupported_gradients_are_rejected() -> None:
    params = [torch.ones(4, 6).requires_grad_() for _ in range(2)]
    optimizer = AdamW(params)
    params[0].grad = torch.ones(4, 6)
    params[1].grad = torch.ones(6, 4).t()
    with pytest.raises(SweepInputError, match=r"gradient 1 is not contiguous"):
        optimizer.step()
    optimizer.nonfinite = "trust"
    with pytest.raises(SweepInputError, match=r"group 0 parameter 1 is not contiguous"):
        optimizer.step()

    assert torch.equal(params[0], torch.ones(4, 6))


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (AdamW, {"lr": -1.0}),
        (AdamW, {"betas": (1.0, 0.9)}),
        (AdamW, {"eps": -1e-8}),
        (AdamW, {"weight_decay": -1.0}),
        (AdamW, {"moments": "fp8"}),
        (AdamW, {"nonfinite": "ignore"}),
        (SGD, {"momentum": -0.1}),
        (SGD, {"nesterov": True}),
        (Lion, {"betas": (0.9, 1.5)}),
    ],
)
def test_invalid_settings_are_rejected(make: type[torch.optim.Optimizer], settings: dict) -> None:
    with pytest.raises(SweepInputError, match=next(iter(settings)).split("_")[0]):
        make([torch.ones(3).requires_grad_()], **settings)


def test_amsgrad_states_are_rejected() -> None:
    param = torch.ones(3).requires_grad_()
    theirs = torch.optim.AdamW([param], amsgrad=True)
    with pytest.raises(SweepInputError, match="amsgrad"):
        AdamW([param]).load_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    ("ours", "theirs"), [(AdamW, torch.optim.AdamW), (SGD, torch.optim.SGD)], ids=["adamw", "sgd"]
)
def test_defaults_are_those_of_torch(ours: type, theirs: type) -> None:
    def defaults(kind: type) -> dict[str, object]:
        return {
            n: p.default for n, p in inspect.signature(kind).parameters.items() if n != "shared"
        }

    # torch's Adam has this argument, and its AdamW sets it.
    expected = defaults(theirs) | {"decoupled_weight_decay": True}
    assert {name: expected[name] for name in defaults(ours)} == defaults(ours)


def test_l2_of_one_is_added_to_the_gradient() -> None:
    raw, master = torch.tensor([0.5, -2.0]), torch.tensor([3.0, 0.25])
    for l2 in (0.0, 0.5, 1.0):
        found = gradient(raw, master, Coefficients(scale=2.0, l2=l2))
        assert torch.equal(found, 2.0 * raw + l2 * master)
