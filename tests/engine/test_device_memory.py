"""Too little device memory is a Penstock error with numbers, and the engine can be closed."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.engine import device_memory
from penstock.engine.compute import Computer
from penstock.engine.device import CpuDevice, DeviceMemory
from penstock.engine.device_memory import (
    check_free_memory,
    explain_out_of_memory,
    use_expandable_segments,
)
from penstock.engine.prepare import prepare
from penstock.errors import DeviceMemoryError, MemoryLimitError
from penstock.machine.discovery import gpus
from penstock.machine.machine import MemoryLimit
from penstock.plan.budget import Budget
from penstock.plan.plan import Plan
from penstock.planner import make_plan
from penstock.tiers import Tier
from penstock.units import GiB, MiB
from tests.support.engines import plain_model, tiny_config
from tests.support.machines import machine
from tests.support.models import model, work

FAILED = "CUDA out of memory. Tried to allocate 742.00 MiB. GPU 0 has a total capacity of 140 GiB"


class FakeGpu(CpuDevice):
    """A device that claims to be a GPU whose memory others may hold."""

    def __init__(self, free: int, reserved: int = 0, total: int = 140 * GiB) -> None:
        super().__init__()
        self.torch_device = torch.device("cuda")
        self._memory = DeviceMemory(allocated=reserved, reserved=reserved, free=free, total=total)
        self.released = 0

    def release(self, nbytes: int) -> None:
        self.released += 1

    def memory(self) -> DeviceMemory:
        return self._memory

    def other_processes(self) -> dict[str, int]:
        return {"process 12 (firefox)": GiB, "process 4711 (python)": 120 * GiB}


@pytest.fixture(scope="module")
def plan() -> Plan:
    inventory = model("qwen2.5-3b")
    budget = Budget(hbm=24 * GiB, dram=60 * GiB)
    return make_plan(inventory, work(inventory, 4096, 4), budget, machine()).plan


def fail(device: FakeGpu, plan: Plan) -> DeviceMemoryError:
    with (
        pytest.raises(DeviceMemoryError) as raised,
        explain_out_of_memory(device, plan, "a training step"),
    ):
        raise torch.OutOfMemoryError(FAILED)
    return raised.value


def test_the_error_has_every_number_and_names_the_processes(plan: Plan) -> None:
    error = fail(FakeGpu(free=2 * GiB, reserved=11 * GiB), plan)

    assert (error.what, error.wanted, error.free) == ("a training step", 742 * MiB, 2 * GiB)
    assert (error.allowed, error.reserved) == (plan.allocator_nbytes, 11 * GiB)
    text = str(error)
    for part in (
        "742 MiB of GPU memory for a training step", "HBM budget of 24.0 GiB",
        "reserved 11.0 GiB", "2.00 GiB of 140 GiB is free",
        "process 4711 (python) holds 120 GiB; process 12 (firefox) holds 1.00 GiB",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(("free", "by_plan"), [(90, True), (13, True), (11, False)])
def test_free_memory_tells_which_limit_was_reached(free: int, by_plan: bool, plan: Plan) -> None:
    error = fail(FakeGpu(free=free * GiB, reserved=plan.allocator_nbytes - 12 * GiB), plan)

    assert error.by_plan == by_plan
    assert ("raise --hbm" in str(error)) == by_plan
    assert ("plan with --hbm" in str(error)) == (not by_plan)


def test_the_suggested_budget_is_what_the_driver_and_this_process_have(plan: Plan) -> None:
    error = fail(FakeGpu(free=2 * GiB, reserved=10 * GiB), plan)

    context = plan.budget.hbm - plan.allocator_nbytes
    assert error.largest == 12 * GiB + context
    assert f"--hbm {error.largest // MiB}MiB or less" in str(error)


def test_the_error_keeps_no_tensor_of_the_failed_step(plan: Plan) -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        tensor = torch.zeros(1000)
        kept.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError(FAILED)

    device = FakeGpu(free=0)
    with pytest.raises(DeviceMemoryError) as raised, explain_out_of_memory(device, plan, "a step"):
        step()

    gc.collect()
    assert raised.value is not None
    assert kept[0]() is None


def limit_memory(monkeypatch: pytest.MonkeyPatch, left: int | None) -> None:
    limit = None if left is None else MemoryLimit(name="/job/memory.max", nbytes=left, left=left)
    monkeypatch.setattr(device_memory, "memory_limit", lambda _: limit)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_run_that_exceeds_the_memory_limit_of_the_process_is_refused(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    resident = plan.process_memory - GiB  # 1 GiB of CUDA and compiled kernels is to come
    monkeypatch.setattr(device_memory, "resident_nbytes", lambda: resident)
    if not on_gpu:
        pools = tuple(pool for pool in plan.pools if pool.what != "CUDA context")
        plan = replace(plan, pools=pools)
    enough = plan.host_nbytes - plan.process_memory + (GiB if on_gpu else 200 * MiB)
    device = FakeGpu(free=140 * GiB) if on_gpu else CpuDevice()
    limit_memory(monkeypatch, enough)
    check_free_memory(device, plan)

    limit_memory(monkeypatch, enough - 1)
    with pytest.raises(MemoryLimitError, match=r"needed by the plan .* raise /job/memory\.max"):
        check_free_memory(device, plan)


def test_host_memory_that_is_allocated_already_is_not_counted_twice(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = plan.process_memory - GiB + 3 * GiB
    monkeypatch.setattr(device_memory, "resident_nbytes", lambda: resident)
    enough = plan.host_nbytes - plan.process_memory + GiB - 3 * GiB
    limit_memory(monkeypatch, enough)
    check_free_memory(FakeGpu(free=140 * GiB), plan, 3 * GiB)

    limit_memory(monkeypatch, enough - 1)
    with pytest.raises(MemoryLimitError):
        check_free_memory(FakeGpu(free=140 * GiB), plan, 3 * GiB)


def test_a_plan_is_refused_before_anything_is_allocated(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, None)
    context = next(pool.nbytes for pool in plan.pools if pool.what == "CUDA context")
    enough = plan.peak(Tier.HBM) - context
    check_free_memory(FakeGpu(free=enough), plan)

    device = FakeGpu(free=enough - 1)
    with pytest.raises(DeviceMemoryError) as raised:
        check_free_memory(device, plan)

    assert device.released, "memory that torch keeps unused was not offered to the plan"
    assert raised.value.largest == plan.peak(Tier.HBM) - 1
    assert "process 4711 (python) holds 120 GiB" in str(raised.value)


def test_a_context_that_will_still_grow_needs_free_memory(plan: Plan) -> None:
    class EarlyGpu(FakeGpu):
        def nbytes_outside_torch(self) -> int | None:
            return 100 * MiB

    enough = plan.peak(Tier.HBM) - 100 * MiB
    check_free_memory(EarlyGpu(free=enough), plan)
    with pytest.raises(DeviceMemoryError):
        check_free_memory(EarlyGpu(free=enough - 1), plan)


def test_a_plan_for_the_cpu_is_not_checked_against_free_memory(plan: Plan) -> None:
    class FullHost(CpuDevice):
        def memory(self) -> DeviceMemory:
            return DeviceMemory(allocated=0, reserved=0, free=0, total=0)

    check_free_memory(FullHost(), plan)


# From Python, in every method that computes.


@pytest.fixture
def engine() -> Iterator[Any]:
    budget = {"hbm": "64MiB", "dram": "64MiB"}
    with prepare(
        plain_model(tiny_config("llama")), context=32, batch=4, device="cpu", budget=budget
    ) as made:
        yield made


def batch(engine: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(4 * 32).view(4, 32)}


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError(FAILED)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda engine: engine.step(batch(engine)), "a training step"),
        (lambda engine: engine.forward_backward(batch(engine)), "a training step"),
        (lambda engine: engine.evaluate([batch(engine)]), "an evaluation"),
    ],
)
def test_engine_methods_raise_penstock_errors(
    call: Any, what: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Computer, "_forward", refuse)
        with pytest.raises(DeviceMemoryError) as raised:
            call(engine)
    assert (raised.value.what, raised.value.wanted) == (what, 742 * MiB)

    assert engine.step(batch(engine)).isfinite(), "the engine cannot be used after the failure"


def test_a_failed_sweep_stays_pending(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.step(batch(engine))
    with monkeypatch.context() as patch:
        patch.setattr("penstock.optim.sweep.PreparedSweep.start", refuse)
        with pytest.raises(DeviceMemoryError, match="the optimizer sweep"):
            engine.finish()

    engine.finish()
    assert all(engine.state[name]["exp_avg"].any() for name in engine.state), "an update was lost"


def test_prepare_that_runs_out_of_memory_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits: list[int | None] = []
    monkeypatch.setattr(CpuDevice, "limit_memory", lambda self, nbytes: limits.append(nbytes))
    monkeypatch.setattr("penstock.engine.allocate.HiddenStates", refuse)
    source = plain_model(tiny_config("llama"))
    budget = {"hbm": "64MiB", "dram": "64MiB"}

    with pytest.raises(DeviceMemoryError) as raised:
        prepare(source, context=32, batch=4, device="cpu", budget=budget)

    assert raised.value.what == "the engine"
    assert limits[-1] is None, "torch stays limited to a plan that is not in use"


# The driver's list of processes.


class FakeNvml:
    class NVMLError(Exception):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != "GPU-1":
            raise self.NVMLError
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, card: str) -> list[Any]:  # noqa: N802
        own = SimpleNamespace(pid=os.getpid(), usedGpuMemory=3)
        unknown = SimpleNamespace(pid=999999999, usedGpuMemory=None)
        return [own, unknown, SimpleNamespace(pid=1, usedGpuMemory=5)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: str) -> list[Any]:  # noqa: N802
        hidden = SimpleNamespace(pid=2**22 + 1, usedGpuMemory=7)
        return [SimpleNamespace(pid=1, usedGpuMemory=5), hidden]


@pytest.mark.parametrize("uuid", ["GPU-1", "GPU-2"])
def test_processes_are_named_with_their_bytes(uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "open_nvml", lambda: contextlib.nullcontext(FakeNvml()))
    first = Path("/proc/1/comm").read_text().strip()

    found = gpus.gpu_processes(uuid)

    names = {f"process 1 ({first})": 5, "process 4194305 (not visible here)": 7}
    assert found == (names if uuid == "GPU-1" else {})


class LoneNvml(FakeNvml):
    """A driver that lists processes by the numbers that they have outside of a container."""

    def __init__(self, *nbytes: int | None) -> None:
        self._nbytes = nbytes

    def nvmlDeviceGetComputeRunningProcesses(self, card: str) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=2**22 + n, usedGpuMemory=b) for n, b in enumerate(self._nbytes)]


@pytest.mark.parametrize(
    ("nvml", "uuid", "nbytes"),
    [
        (FakeNvml(), "GPU-1", 3),
        (FakeNvml(), "GPU-2", None),
        (LoneNvml(11), "GPU-1", 11),
        (LoneNvml(None), "GPU-1", None),
        (LoneNvml(11, 12), "GPU-1", None),
        (LoneNvml(), "GPU-1", None),
        (None, "GPU-1", None),
    ],
    ids=["own", "another GPU", "lone", "not reported", "several", "not listed", "no library"],
)
def test_the_driver_reports_what_this_process_holds(
    nvml: FakeNvml | None, uuid: str, nbytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "open_nvml", lambda: contextlib.nullcontext(nvml))

    assert gpus.own_gpu_nbytes(uuid) == nbytes


def test_without_the_management_library_nobody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "open_nvml", lambda: contextlib.nullcontext(None))

    assert gpus.gpu_processes("GPU-1") == {}


# The allocator.


@pytest.mark.parametrize(
    "setter", ["_C._accelerator_setAllocatorSettings", "cuda.memory._set_allocator_settings"]
)
@pytest.mark.parametrize(
    ("configured", "backend", "switched"),
    [
        ({}, "native", True),
        ({}, "cudaMallocAsync", False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, "native", False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "native", False),
        ({"PYTORCH_ALLOC_CONF": ""}, "native", True),
    ],
)
def test_the_allocator_is_switched_unless_the_user_configured_it(
    configured: dict[str, str],
    backend: str,
    switched: bool,
    setter: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: list[str] = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in configured.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.memory.get_allocator_backend", lambda: backend)
    monkeypatch.setattr(f"torch.{setter}", settings.append, raising=False)
    if not setter.startswith("_C"):
        monkeypatch.delattr("torch._C._accelerator_setAllocatorSettings", raising=False)

    use_expandable_segments()

    assert settings == (["expandable_segments:True"] if switched else [])
