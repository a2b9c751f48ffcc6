"""Every optimizer gives the same bits under every plan, and the losses of plain torch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import EngineStateError, SettingsError, WorkloadError
from tests.equivalence.runs import (
    DISK,
    DRAM,
    FEW,
    RESIDENT,
    WAYS,
    Result,
    Setup,
    Way,
    differing,
    state_of,
    train,
    warm_up,
)
from tests.support.engines import FAMILIES
from tests.support.samples import sample
from tests.support.torch_loop import TorchLoop

SGD = {"lr": 0.3, "weight_decay": 0.1}
MOMENTUM = SGD | {"momentum": 0.9, "nesterov": True}
MUON = {
    "lr": 2e-3,
    "weight_decay": 0.1,
    "momentum": 0.9,
    "nesterov": True,
    "ns_steps": 5,
    "adjust_lr_fn": "match_rms_adamw",
    "betas": (0.9, 0.95),
    "eps": 1e-8,
}
ADAFACTOR = {"lr": 1e-2, "weight_decay": 0.1, "d": 1.0, "beta2_decay": -0.8}
LION = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}


class Lion(torch.optim.Optimizer):
    """Lion as algorithm 2 of Chen et al. (2023) states it."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                direction = torch.sign(beta1 * m + (1 - beta1) * p.grad)
                p.sub_(group["lr"] * (direction + group["weight_decay"] * p))
                m.copy_(beta2 * m + (1 - beta2) * p.grad)


class MuonAndAdamW:
    """`torch.optim.Muon` for the matrices of layers, and AdamW for all other parameters."""

    def __init__(self, masters: Mapping[str, nn.Parameter], **options: Any) -> None:
        ours = {n: p for n, p in masters.items() if ".layers." in n and p.dim() == 2}
        rest = [p for n, p in masters.items() if n not in ours]
        adamw = {n: options.pop(n) for n in ("betas", "eps")}
        common = {n: options[n] for n in ("lr", "weight_decay")}
        groups = [
            {"params": [p for p in rest if p.dim() == 2]},
            {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
        ]
        self._both = (
            torch.optim.Muon(ours.values(), **options),
            torch.optim.AdamW(groups, **common, **adamw),
        )
        self.param_groups = [group for each in self._both for group in each.param_groups]

    def zero_grad(self) -> None:
        for each in self._both:
            each.zero_grad()

    def step(self) -> None:
        for each in self._both:
            each.step()


PLAIN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "sgd with momentum": torch.optim.SGD,
    "lion": Lion,
    "adafactor": torch.optim.Adafactor,
}
"""The same optimizers in plain torch. Muon is made from the names of parameters."""

CASES = {
    "sgd": ({"optimizer": "sgd"}, SGD),
    "sgd with momentum": ({"optimizer": "sgd", "momentum": True}, MOMENTUM),
    "lion": ({"optimizer": "lion"}, LION),
    "muon": ({"optimizer": "muon"}, MUON),
    "adafactor": ({"optimizer": "adafactor"}, ADAFACTOR),
}
"""Workload and options of each optimizer, by name."""

OWN_RULES = ("sgd with momentum", "lion", "muon", "adafactor")
"""Cases with an update rule of their own: SGD without momentum is a part of SGD with it."""


def assert_same(results: dict[str, Result]) -> None:
    first, *others = results
    for name in others:
        assert results[name].losses == results[first].losses, name
        assert results[name].norms == results[first].norms, name
        assert differing(results[first].state, results[name].state) == [], name


@pytest.mark.parametrize("case", sample(CASES, OWN_RULES))
@pytest.mark.parametrize(
    ("ways", "steps", "family", "work"),
    [
        pytest.param(FEW, 4, "llama", {}, id="few plans"),
        *(
            pytest.param(WAYS, 20, family, {"dtype": dtype}, marks=pytest.mark.long)
            for family in FAMILIES
            for dtype in ("bf16", "fp16", "fp32")
        ),
    ],
)
def test_every_optimizer_gives_the_same_bits_under_every_plan(
    case: str, ways: tuple[Way, ...], steps: int, family: str, work: dict[str, Any], tmp_path: Path
) -> None:
    workload, options = CASES[case]
    setup = Setup.of(family, **workload, **work)

    results = {
        way.name: train(setup, way, tmp_path, steps=steps, optimizer=options) for way in ways
    }

    assert_same(results)
    before = {f"{name} weight": tensor for name, tensor in setup.source.state_dict().items()}
    changed = [name for name in before if not before[name].equal(
        results[RESIDENT.name].state[name].view(before[name].shape)
    )]  # fmt: skip
    assert len(changed) > 0.5 * len(before)


def rate_of(lr: float) -> Callable[[int, int], float]:
    """Return the learning rates of `follow`: half for vectors."""
    return lambda step, dims: lr * warm_up(step) * (1.0 if dims >= 2 else 0.5)


@pytest.mark.parametrize("case", sample(CASES, OWN_RULES))
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(f, marks=pytest.mark.long) for f in FAMILIES[1:])]
)
def test_losses_of_twenty_steps_are_those_of_plain_torch(
    case: str, family: str, tmp_path: Path
) -> None:
    """In fp32, with clipping, two param groups, a schedule and a frozen tensor.

    Muon rounds to bf16, and SGD at this rate can diverge, so rounding errors may grow from step to
    step. How fast they do is shown by a second plain loop, whose weights start one rounding apart.
    """
    workload, options = CASES[case]
    setup = Setup.of(family, dtype="fp32", **workload)
    frozen = {t.name for b in setup.model.blocks for t in b.tensors if not t.trainable}
    nudged = nudge(copy.deepcopy(setup.source))

    result = train(setup, DRAM, tmp_path, optimizer=options)

    def plain(model: nn.Module) -> list[float]:
        loop = TorchLoop(
            model, clip=setup.work.clip, micro_batch=2,
            settings=options if case in PLAIN else {},
            frozen=lambda name: name in frozen, lr_of=rate_of(options["lr"]),
            make_optimizer=PLAIN.get(case, torch.optim.SGD),
        )  # fmt: skip
        if case == "muon":
            loop.optimizer = MuonAndAdamW(loop.masters, **options)  # type: ignore[assignment]
        return [loop.step(batch) for batch in setup.batches()]

    wanted = plain(setup.source)
    apart = [abs(a / b - 1) for a, b in zip(plain(nudged), wanted, strict=True)]
    grown = list(itertools.accumulate(apart, max))
    assert grown[2] < 1e-6, "a wrong rule would show in the first steps"
    for loss, expected, growth in zip(result.losses, wanted, grown, strict=True):
        assert loss == pytest.approx(expected, rel=max(1e-5, 4 * growth))


def nudge(model: nn.Module) -> nn.Module:
    """Change half of a model's weights, in fp32, by one rounding."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            up = torch.rand(weight.shape, generator=generator) < 0.5
            weight.copy_(torch.where(up, torch.nextafter(weight, 2 * weight), weight))
    return model


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_continues_bit_for_bit_under_another_plan(case: str, tmp_path: Path) -> None:
    workload, options = CASES[case]
    setup, batches = Setup.of("llama", **workload), Setup.of("llama", **workload).batches(5)
    with setup.engine(DRAM, tmp_path, optimizer=options) as engine:
        for batch in batches[:3]:
            engine.step(batch)
        engine.write(tmp_path / "saved")
        for batch in batches[3:]:
            engine.step(batch)
        expected = state_of(engine)

    with setup.engine(WAYS[3], tmp_path, optimizer=options | {"lr": 9.0}) as engine:
        engine.read(tmp_path / "saved")
        for batch in batches[3:]:
            engine.step(batch)
        assert differing(state_of(engine), expected) == []


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    with Setup.of("llama", optimizer="lion").engine(RESIDENT, tmp_path, optimizer=LION) as engine:
        engine.write(tmp_path / "saved")

    with (
        Setup.of("llama").engine(RESIDENT, tmp_path) as engine,
        pytest.raises(EngineStateError, match=r"optimizer: was lion .* is adamw now"),
    ):
        engine.read(tmp_path / "saved")


def test_the_state_dict_is_that_of_torchs_optimizer(tmp_path: Path) -> None:
    setup = Setup.of("llama", optimizer="sgd", momentum=True, dtype="fp32")
    batch = setup.batches(1)[0]
    with setup.engine(DRAM, tmp_path, optimizer=MOMENTUM) as engine:
        engine.step(batch)
        saved, expected = engine.optimizer.state_dict(), state_of(engine)

    assert set(saved["state"][0]) == {"step", "momentum_buffer"}
    with setup.engine(DISK, tmp_path, optimizer=MOMENTUM) as engine:
        engine.optimizer.load_state_dict(saved)
        loaded = state_of(engine)
        first = [name for name in expected if name.endswith(" first")]
        assert engine.steps == 1
        assert all(loaded[name].equal(expected[name]) for name in first)


@pytest.mark.parametrize("moments", ["bf16", "int8"])
@pytest.mark.parametrize("case", ["sgd with momentum", "lion", "muon"])
def test_rounded_moments_are_the_same_under_every_plan(
    case: str, moments: str, tmp_path: Path
) -> None:
    workload, options = CASES[case]
    if (case, moments) == ("muon", "int8"):
        with pytest.raises(WorkloadError, match="muon stores its state in fp32 or bf16 only"):
            Setup.of("llama", moments=moments, **workload)
        return
    setup = Setup.of("llama", moments=moments, **workload)

    assert_same({w.name: train(setup, w, tmp_path, steps=3, optimizer=options) for w in FEW[:2]})


def test_options_that_an_optimizer_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="betas: is an option of adamw and lion and muon, not"):
        Setup.of("llama", optimizer="sgd").engine(DRAM, tmp_path, optimizer={"betas": (0.9, 0.9)})
    with pytest.raises(SettingsError, match=r"momentum: is 0\.9, but the plan has no memory"):
        Setup.of("llama", optimizer="sgd").engine(DRAM, tmp_path, optimizer={"momentum": 0.9})
    with pytest.raises(WorkloadError, match="SGD without momentum stores none"):
        Setup.of("llama", optimizer="sgd", moments="int8")


@pytest.mark.parametrize("case", ["muon", "adafactor"])
def test_optimizers_of_whole_tensors_are_refused_with_several_ranks(case: str) -> None:
    with pytest.raises(WorkloadError, match=f"{case} needs whole tensors"):
        Setup.of("llama", world=2, **CASES[case][0])


def test_state_dicts_of_muon_and_adafactor_are_those_of_torch(tmp_path: Path) -> None:
    """The state of each tensor has the names and shapes of torch's optimizers, and loads again."""
    for case in ("muon", "adafactor"):
        workload, options = CASES[case]
        setup = Setup.of("llama", freeze=(), dtype="fp32", **workload)
        with setup.engine(DRAM, tmp_path, optimizer=options) as engine:
            engine.step(setup.batches(1)[0])
            saved, expected = engine.optimizer.state_dict(), state_of(engine)
            names = [engine.optimizer.name_of(p) for g in engine.optimizer.param_groups
                     for p in g["params"]]  # fmt: skip
        states = {name: saved["state"][i] for i, name in enumerate(names)}
        shapes = {k: tuple(v.shape) for k, v in states["model.layers.0.mlp.up_proj.weight"].items()}
        norm = set(states["model.layers.0.input_layernorm.weight"])
        if case == "muon":
            assert shapes == {"step": (), "momentum_buffer": (80, 32)}
            assert norm == {"step", "exp_avg", "exp_avg_sq"}
        else:
            assert shapes == {"step": (), "row_var": (80, 1), "col_var": (1, 32)}
            assert norm == {"step", "variance"}
        with setup.engine(DISK, tmp_path, optimizer=options) as engine:
            engine.optimizer.load_state_dict(saved)
            loaded = state_of(engine)
        moments = [n for n in expected if n.endswith((" first", " second"))]
        assert [n for n in moments if not loaded[n].equal(expected[n])] == []
