"""What a rehearsal measured is used by the next plan for the same thing, and for nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.memory_source import working_memory_source
from penstock.engine.plan_choice import plan_request
from penstock.machine.discovery import discover
from penstock.machine.presets import cpu_machine
from penstock.plan import memory_cache
from penstock.plan.memory_cache import keep_measured, load_memory, memory_key, save_memory
from penstock.plan.working_memory import PartMemory, WorkingMemory
from penstock.plan.working_memory_estimate import estimate_working_memory
from penstock.plan.workload import Workload
from penstock.probe.machine_choice import TargetMachine
from penstock.settings import Settings
from penstock.units import GiB, MiB
from tests.support import fork_server
from tests.support.engines import inventory, tiny_config, workload
from tests.support.machines import machine
from tests.support.samples import sample

MEASURED = WorkingMemory(
    parts=(PartMemory(name="layer", forward=MiB, backward=3 * GiB),),
    inputs=512,
    arguments=1024,
    libraries=64 * MiB,
    gaps=30 * MiB,
    context=500 * MiB,
    origin="measured",
)
GPU = machine().gpus[0].name


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "penstock" / "working_memory"


def key(config: Any = None, work: Workload | None = None, gpu: str = GPU) -> str:
    config = config or tiny_config("llama")
    return memory_key(config, inventory(config, ()), work or workload(), gpu)


def test_an_entry_is_read_back_as_it_was_written(cache: Path) -> None:
    save_memory(key(), MEASURED)

    assert load_memory(key(), "measured") == MEASURED
    assert load_memory(key(), "traced") is None
    assert cache.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in cache.iterdir()] == [0o600]


def test_the_key_has_everything_that_changes_working_memory(monkeypatch: Any) -> None:
    work = workload()
    one_head_sum = replace(work, numerics=replace(work.numerics, head_sum="micro", loss_chunk=4))
    assert one_head_sum.has_head_sum
    single = replace(one_head_sum, batch=work.numerics.micro_batch)
    assert key(work=one_head_sum) != key(work=single)
    others = [
        key(tiny_config("llama", hidden_act="gelu")),  # the same tensors, other code
        key(tiny_config("llama", intermediate_size=96)),
        key(tiny_config("qwen3")),
        key(work=replace(work, context=work.context // 2)),
        key(work=replace(work, dtype="fp16")),
        key(work=replace(work, numerics=replace(work.numerics, loss_chunk=4))),
        key(gpu="another"),
    ]
    config = tiny_config("llama")
    other_class = replace(inventory(config, ()), architecture="Derived")
    others.append(memory_key(config, other_class, work, GPU))
    monkeypatch.setattr(memory_cache, "code_fingerprint", lambda: "changed")
    others.append(key())
    monkeypatch.undo()
    monkeypatch.setattr(memory_cache, "_version", lambda name: "0.0.1")
    others.append(key())

    assert key(work=replace(work, batch=work.batch + 1)) == others[-1]
    monkeypatch.undo()
    assert len({key(), *others}) == len(others) + 1


def test_noise_changes_neither_the_entry_nor_the_next_plan() -> None:
    assert keep_measured(key(), MEASURED) == MEASURED
    noisy = replace(MEASURED, gaps=MEASURED.gaps + 5 * MiB, context=510 * MiB)

    assert keep_measured(key(), noisy) == MEASURED
    assert load_memory(key(), "measured") == MEASURED


@pytest.mark.parametrize(
    "change",
    [
        {"parts": (PartMemory(name="layer", forward=0, backward=3 * GiB + 4096),)},
        {"inputs": 1024},
        {"arguments": 1536},
        {"libraries": 96 * MiB},
        {"context": 520 * MiB},
    ],
)
def test_more_than_noise_replaces_the_entry(change: dict[str, Any]) -> None:
    keep_measured(key(), MEASURED)
    more = replace(MEASURED, **change)

    assert keep_measured(key(), more) == more
    assert load_memory(key(), "measured") == more


@pytest.mark.parametrize("text", ["", "{", '{"version": 1, "parts": []}', '{"version": 99}'])
def test_a_damaged_entry_counts_as_none(text: str, cache: Path) -> None:
    save_memory(key(), MEASURED)
    next(cache.iterdir()).write_text(text)

    assert load_memory(key(), "measured") is None


@pytest.mark.parametrize("shared", ["file", "directory"])
def test_what_others_could_have_written_is_not_used(shared: str, cache: Path) -> None:
    save_memory(key(), MEASURED)
    (cache if shared == "directory" else next(cache.iterdir())).chmod(0o777)

    assert load_memory(key(), "measured") is None


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("in the way")

    save_memory(key(), MEASURED)

    assert load_memory(key(), "measured") is None


def test_the_next_plan_uses_what_was_measured() -> None:
    config = tiny_config("llama")
    target = TargetMachine(machine=machine(), kernels=False, is_here=False)
    settings = Settings.of({"context": 64, "batch": 4, "hbm": "20GiB", "dram": "20GiB"})
    request = plan_request(inventory(config, ()), settings, target, config=config)
    before = request.make_plan().planned
    assert before is not None
    assert before.memory.origin == "traced"

    work = request.workload
    save_memory(memory_key(config, request.inventory, work, GPU), MEASURED)
    request = plan_request(inventory(config, ()), settings, target, config=config)
    planned = request.make_plan().planned

    assert planned is not None
    assert planned.memory == MEASURED
    pools = {pool.what: pool.nbytes for pool in planned.plan.pools}
    assert pools["working memory"] == 3 * GiB
    assert pools["CUDA context"] == 500 * MiB
    assert pools["library buffers"] == 64 * MiB


def test_a_loss_of_the_users_own_is_not_covered_by_a_measurement() -> None:
    config, work = tiny_config("llama"), workload()
    model = inventory(config, ())
    save_memory(memory_key(config, model, work, GPU), MEASURED)

    source = working_memory_source(config, machine(), own_loss=True)

    assert source(model, work).origin == "traced"
    assert working_memory_source(config, machine())(model, work) == MEASURED


def test_a_trace_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config, work = tiny_config("llama"), workload()
    model = inventory(config, ())
    first = working_memory_source(config, machine())(model, work)
    assert first.origin == "traced"

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("traced again")

    monkeypatch.setattr("penstock.engine.trace_memory.trace_working_memory", fail)

    assert working_memory_source(config, machine())(model, work) == first


def test_code_from_a_models_repository_is_traced_every_time(cache: Path) -> None:
    config, work = tiny_config("llama"), workload()
    model = inventory(config, ())

    source = working_memory_source(config, machine(), trust_remote_code=True)

    assert source(model, work).origin == "traced"
    assert not cache.exists()


DAMAGED = ["", "{", '{"version": 1, "parts": []}']


@pytest.mark.parametrize("text", sample(DAMAGED, DAMAGED[1:2]))
def test_a_damaged_trace_is_made_again(text: str, cache: Path) -> None:
    config, work = tiny_config("llama"), workload()
    model = inventory(config, ())
    first = working_memory_source(config, machine())(model, work)
    (path,) = cache.iterdir()
    path.write_text(text)

    assert working_memory_source(config, machine())(model, work) == first
    assert path.read_text() != text


def test_a_model_that_cannot_be_traced_is_estimated_with_a_remark(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("no such layer\nand more")

    monkeypatch.setattr("penstock.engine.trace_memory.trace_working_memory", fail)
    config, work = tiny_config("llama"), workload()
    model = inventory(config, ())
    memory = working_memory_source(config, machine())(model, work)

    assert memory.parts == estimate_working_memory(model, work).parts
    assert memory.origin == "estimated"
    assert "could not be traced (ZeroDivisionError: no such layer)" in memory.remark
    assert not cache.exists()  # the next version of the model's code may be traced


FAILED_TRACE = """
from transformers import HeliumConfig
from penstock.engine.memory_source import working_memory_source
from tests.support.engines import inventory, workload
from tests.support.machines import machine

# Heads of another size than the projections: the model cannot run.
sizes = {"hidden_size": 96, "head_dim": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
config = HeliumConfig(**sizes, vocab_size=300, intermediate_size=64, num_hidden_layers=2)
print(working_memory_source(config, machine())(inventory(config, ()), workload()).remark)
"""


def test_a_failed_trace_writes_nothing_to_the_terminal() -> None:
    """In a process of its own, because pytest changes where torch's messages go."""
    run = fork_server.run(["-c", FAILED_TRACE])

    assert run.returncode == 0, run.stderr
    assert "could not be traced (RuntimeError: " in run.stdout
    assert "Traceback" not in run.stderr


def test_without_a_gpu_working_memory_is_estimated() -> None:
    source = working_memory_source(tiny_config("llama"), cpu_machine(discover()))

    assert source is estimate_working_memory
