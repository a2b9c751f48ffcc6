"""`penstock train --gpus N`: the result of one rank, on any number of them.

Ranks are processes that compute on the CPU, connected by gloo or by shared memory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.machine.limits import HostMemory
from penstock.machine.sysfs import System
from penstock.observe.peers import peer_waits
from penstock.observe.run_files import read_run
from penstock.settings import Settings, read_yaml
from penstock.train import launch
from penstock.units import GiB
from tests.train.runs import RESIDENT, RunResult, Runs, run_command, wait_for_exit, wait_for_line

BATCH = ("--batch", "7", "--micro-batch", "2", "--clip", "0.5")
"""Four micro-batches, the last of them smaller: a ragged last wave for 3 ranks."""

STEPS = ("--steps", "5", "--save-every", "2", "--keep", "9", "--keep-resumable", "9")

Command = list[str]


def command_of(runs: Runs, out: Path, *more: str) -> Command:
    return [sys.executable, "-m", "penstock", *runs.flags(out, *RESIDENT, *BATCH, *more)]


def start(command: Command, **environment: str) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, as a shell does."""
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def run(command: Command, **environment: str) -> RunResult:
    return wait_for_exit(start(command, **environment))


def run_on(world: int, runs: Runs, out: Path, *more: str, **environment: str) -> RunResult:
    if world == 1 and not environment:
        return run_command(runs.flags(out, *RESIDENT, *BATCH, *more))
    return run(command_of(runs, out, "--gpus", str(world), *more), **environment)


def files_of(checkpoint: Path) -> dict[str, bytes]:
    """Return everything that must not depend on the number of ranks.

    run.yaml has the number itself, the directory and the ID of the run, and the manifest has the
    checksum of run.yaml.
    """
    own = ("run.yaml", "complete.json")
    found = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name not in own}
    manifest = json.loads((checkpoint / "complete.json").read_text())
    records = {name: record for name, record in manifest["files"].items() if name not in own}
    return {**found, "manifest": json.dumps(records).encode()}


def checkpoints_of(out: Path) -> dict[str, dict[str, bytes]]:
    return {path.name: files_of(path) for path in sorted(out.glob("checkpoint-*"))}


def metrics_of(out: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, without what differs between equal runs."""
    times = ("seconds", "tokens_per_second", "time", "path", "out", "model", "run_id",
             "peak_host_bytes", "peak_hbm_bytes")  # fmt: skip
    lines = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in times} for line in lines]


def errors_of(result: RunResult) -> list[str]:
    """Return the lines that say why a run failed."""
    return [line for line in result.errors.splitlines() if line.startswith("error: ")]


@pytest.fixture(scope="module")
def alone(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run on one rank, with evaluations and a best model."""
    torch.set_num_threads(1)  # before the fixture that does this for every test
    out = tmp_path_factory.mktemp("alone") / "out"
    ended = run_on(1, runs, out, *STEPS, "--eval-every", "2", "--save-best")
    assert ended.code == 0, ended.errors
    assert max(event["grad_norm"] for event in ended.of("step")) > 0.5  # clipping is at work
    return out


@pytest.mark.parametrize(
    ("world", "transport"),
    [
        (2, "collective"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((2, "shared"), (3, "collective"), (4, "collective"), (4, "shared"))
        ),
    ],
)
def test_ranks_train_to_the_same_bytes(
    world: int, transport: str, runs: Runs, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    more = ("--eval-every", "2", "--save-best", "--transport", transport)
    ended = run_on(world, runs, out, *STEPS, *more)

    assert ended.code == 0, ended.errors
    assert f"note: {world} ranks compute on CPUs" in ended.errors
    assert json.loads((out / "plan.json").read_text())["placement"]["transport"] == transport
    assert checkpoints_of(out) == checkpoints_of(alone)
    assert list(checkpoints_of(out)) == [f"checkpoint-{step:06d}" for step in (2, 4, 5)]
    assert metrics_of(out) == metrics_of(alone)
    assert (out / "best/model.safetensors").read_bytes() == (
        alone / "best/model.safetensors"
    ).read_bytes()
    assert read_yaml(out / "run.yaml")["gpus"] == world
    hidden = [path.name for path in out.iterdir() if path.name.startswith(".")]
    assert hidden == []


@pytest.mark.parametrize(
    ("more", "free", "words"),
    [
        (("--gpus", "8"), GiB, ["batch: is 7 micro-batches of 1", "(--batch 8)"]),
        (("--gpus", "5", "--micro-batch", "2"), GiB, ["batch: is 4 micro-batches of 2"]),
        (("--gpus", "4"), GiB, ["gpus: is 4", "need 1.09 GiB", "1.00 GiB", "--gpus 3 or less"]),
    ],
)
def test_too_many_ranks_are_refused_before_one_is_started(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], free: int,
    words: list[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(launch, "host_memory", lambda _: HostMemory(free, free, None))
    monkeypatch.setattr(launch, "_Launcher", None)  # which would start them

    ended = run_command(
        runs.flags(tmp_path / "out", *RESIDENT, "--batch", "7", "--micro-batch", "auto", *more)
    )

    assert ended.code == 1
    assert [word for word in words if word not in " ".join(errors_of(ended))] == []
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_one_report_shows_all_ranks(runs: Runs, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    more = (*STEPS, "--eval-every", "2", "--save-best", "--profile", "3")
    ended = run_on(3, runs, out, *more)

    assert ended.code == 0, ended.errors
    assert checkpoints_of(out) == checkpoints_of(alone)
    recorded = read_run(out)
    assert list(recorded.ranks) == ["rank-0", "rank-1", "rank-2"]
    for rank in recorded.ranks.values():
        assert {phase.step for phase in rank.phases if phase.name == "backward"} == {1, 2, 3}
        assert rank.observation.ended_by == "exit"
    peers = peer_waits(recorded)
    assert peers is not None
    assert peers.steps == 3
    assert json.loads((out / "profile/trace.json").read_text())["traceEvents"]


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3])
def test_an_adapter_is_the_same_on_ranks(world: int, runs: Runs, tmp_path: Path) -> None:
    more = (*STEPS, "--lora", "r=4,alpha=8,dropout=0.1,save=lm_head")
    streamed = ("--hbm", "3MiB", "--dram", "9MiB", "--nvme", f"{runs.disk}:64MiB")

    one = run_on(1, runs, tmp_path / "one", *more)
    several = run_on(world, runs, tmp_path / "several", *more, *streamed)

    assert one.code == several.code == 0, several.errors
    assert checkpoints_of(tmp_path / "several") == checkpoints_of(tmp_path / "one")
    assert "base_model.json" in files_of(tmp_path / "one/checkpoint-000004")
    assert metrics_of(tmp_path / "several") == metrics_of(tmp_path / "one")


def test_a_batch_that_is_not_given_is_left_to_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "host_memory", lambda _: HostMemory(GiB, GiB, None))
    launch._check_processes(Settings.of({"gpus": 3}), System())


@pytest.mark.long
def test_torchrun_starts_ranks_too(runs: Runs, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    own = command_of(runs, out, *STEPS, "--eval-every", "2", "--save-best")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

    ended = run([*torchrun, "--nproc-per-node", "2", *own[1:]])

    assert ended.code == 0, ended.errors
    assert checkpoints_of(out) == checkpoints_of(alone)
    assert read_yaml(out / "run.yaml")["gpus"] == 2


@pytest.mark.long
def test_torchrun_does_not_change_the_number_of_threads(runs: Runs, tmp_path: Path) -> None:
    """Torchrun sets OMP_NUM_THREADS=1, with which a CPU gives other bits than a single process."""
    one, two = tmp_path / "one", tmp_path / "two"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for out, launcher in ((one, [sys.executable]), (two, [*torchrun, "--nproc-per-node", "2"])):
        own = command_of(runs, out, "--steps", "2")
        subprocess.run([*launcher, *own[1:]], env=environment, check=True, capture_output=True)

    assert checkpoints_of(one) == checkpoints_of(two)


@pytest.mark.long
def test_a_contradiction_with_torchrun_is_an_error(runs: Runs, tmp_path: Path) -> None:
    own = command_of(runs, tmp_path / "out", "--gpus", "3", "--steps", "1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

    ended = run([*torchrun, "--nproc-per-node", "2", *own[1:]])

    assert ended.code == 1
    assert "is 3, but the launcher has started 2" in " ".join(ended.errors.split())


@pytest.mark.long
def test_a_run_continues_on_other_numbers_of_ranks(runs: Runs, alone: Path, tmp_path: Path) -> None:
    """3, then 1, then 4 ranks, with other budgets each time, equal the uninterrupted run."""
    out, more = tmp_path / "out", (*STEPS, "--eval-every", "2", "--save-best")
    other = ("--dram", "9MiB", "--hbm", "3MiB"), ("--nvme", f"{runs.disk}:64MiB", "--hbm", "2MiB")
    interrupt_after(2, start(command_of(runs, out, "--gpus", "3", *more)))
    for path in out.glob("checkpoint-00000[45]"):  # the signal came late
        path.rename(tmp_path / f"late-{path.name}")
    taken = max(int(path.name[-6:]) for path in out.glob("checkpoint-*"))
    assert 2 <= taken < 4

    first = run_on(1, runs, out, "--resume", "--gpus", "1", *other[0], "--steps", "5")
    assert first.code == 0, first.errors
    # Continue from the checkpoint that one rank has saved at step 4.
    (out / "checkpoint-000005").rename(tmp_path / "checkpoint-000005")
    last = run_on(4, runs, out, "--resume", *other[1], "--steps", "5")

    assert last.code == 0, last.errors
    assert "no longer bit-identical" not in last.errors
    assert read_yaml(out / "run.yaml")["gpus"] == 4
    kept = checkpoints_of(alone)
    for name, files in checkpoints_of(out).items():
        if name in kept:
            assert files == kept[name], name
    assert files_of(out / "checkpoint-000005") == kept["checkpoint-000005"]
    assert files_of(tmp_path / "checkpoint-000005") == kept["checkpoint-000005"]


# Signals.


def interrupt_after(step: int, child: subprocess.Popen[str], whom: str = "launcher") -> RunResult:
    """Send SIGINT after a step, and return the result."""
    read = wait_for_line(child, '"step"', f'"step": {step},')
    if whom == "launcher":
        os.kill(child.pid, signal.SIGINT)
    elif whom == "group":
        os.killpg(child.pid, signal.SIGINT)
    else:
        os.kill(rank_processes(child.pid)[int(whom)], signal.SIGINT)
    ended = wait_for_exit(child)
    return RunResult(ended.code, read + ended.output, ended.errors)


def rank_processes(launcher: int) -> dict[int, int]:
    """Return the process number of each rank."""
    found = {}
    for child in children_of(launcher):
        for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                found[int(entry[5:])] = child
    return found


def children_of(parent: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            yield int(path.parent.name)


@pytest.mark.parametrize(
    "whom", ["launcher", *(pytest.param(w, marks=pytest.mark.long) for w in ("group", "0", "1"))]
)
def test_ctrl_c_saves_once(whom: str, runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = command_of(runs, out, "--gpus", "2", "--steps", "100000", "--save-every", "5h")

    ended = interrupt_after(2, start(command), whom)

    assert ended.code == 130, ended.errors
    assert errors_of(ended) == []
    (saved,) = ended.of("save")
    (path,) = out.glob("checkpoint-*")
    assert str(path) == saved["path"]
    assert ended.of("stopped")[0]["step"] == saved["step"]
    assert "Traceback" not in ended.errors
    if whom in ("launcher", "group"):
        assert ended.errors.count("stopping: finishing the step") == 1
    resumed = run_command(
        runs.flags(out, *RESIDENT, *BATCH, "--resume", "--gpus", "1",
                   "--steps", str(saved["step"] + 1))
    )  # fmt: skip
    assert resumed.code == 0, resumed.errors
    assert list(resumed.losses) == [saved["step"] + 1]


@pytest.mark.long
def test_the_second_signal_stops_all_ranks_immediately(runs: Runs, tmp_path: Path) -> None:
    """While rank 1 takes its time, so that the run cannot stop by itself."""
    slow = "import time; patch(Engine, 'step', lambda self, *args: time.sleep(600))"
    out = tmp_path / "out"
    command = command_of(runs, out, "--gpus", "2", "--steps", "100000")
    child = start(command, **patched(tmp_path, {1: slow}))
    wait_for_line(child, '"eval"')
    ranks = rank_processes(child.pid)
    time.sleep(1.0)
    for _ in range(2):
        os.kill(child.pid, signal.SIGINT)
        time.sleep(1.0)

    ended = wait_for_exit(child)

    assert ended.code == 130
    assert errors_of(ended) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())


# Failures. A module that Python imports at its start changes the code of some ranks.


def patched(folder: Path, code: dict[int | None, str]) -> dict[str, str]:
    """Return an environment in which ranks run other code; None stands for all ranks."""
    lines = ["import os", "rank = os.environ.get('RANK')", "if rank is not None:",
             "    from penstock.engine.engine import Engine",
             "    def patch(owner, name, new):",
             "        setattr(owner, name, new)"]  # fmt: skip
    for rank, text in code.items():
        lines += [f"if rank == '{rank}':" if rank is not None else "if rank is not None:"]
        lines += [f"    {line}" for line in text.splitlines()]
    where = folder / "patches"
    where.mkdir()
    (where / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    return {"PYTHONPATH": str(where)}


SMALL_SHARDS = """
from functools import partial
from penstock.engine import state_io
patch(state_io, 'ShardWriter', partial(state_io.ShardWriter, max_shard_nbytes=40_000))
"""

FULL_DISK = """
import errno
from penstock.storage.direct_file import DirectWriter
calls, write = [], DirectWriter.write
def full(self, data):
    calls.append(data)
    if len(calls) == 2:
        raise OSError(errno.ENOSPC, 'No space left on device')
    return write(self, data)
patch(DirectWriter, 'write', full)
"""

OUT_OF_MEMORY = """
from penstock.errors import DeviceMemoryError
def fail(at, total, what):
    if what.startswith('backward'):
        raise DeviceMemoryError('a layer', wanted=2**40, free=5, total=6, allocated=1, reserved=1)
step = Engine.step
def second(self, batch):
    if self.steps == 1:
        self.on_progress = fail
    return step(self, batch)
patch(Engine, 'step', second)
"""

NO_MEMORY_AT_START = """
from penstock.engine import device_memory
from penstock.errors import DeviceMemoryError
def fail(*args):
    raise DeviceMemoryError('the engine', wanted=2**40, free=5, total=6, allocated=1, reserved=1)
patch(device_memory, 'check_free_memory', fail)
"""


@pytest.mark.long
def test_a_full_disk_on_one_rank_fails_only_the_save(
    runs: Runs, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    environment = patched(tmp_path, {None: SMALL_SHARDS, 1: FULL_DISK})

    ended = run_on(3, runs, out, *STEPS, "--eval-every", "2", "--save-best", **environment)

    assert ended.code == 0, ended.errors
    assert "checkpoint not saved: rank 1: " in ended.errors
    assert "the disk is full" in ended.errors
    names = [path.name for path in sorted(out.glob("checkpoint-*"))]
    assert names == ["checkpoint-000004", "checkpoint-000005"]
    metrics = [
        line for line in metrics_of(alone) if (line["event"], line.get("step")) != ("save", 2)
    ]
    sizes = [{**line, "bytes": None} for line in metrics_of(out)]
    assert sizes == [{**line, "bytes": None} for line in metrics]


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "message"),
    [(OUT_OF_MEMORY, "a layer"), (NO_MEMORY_AT_START, "the engine"),
     ("os.kill(os.getpid(), 9)", "rank 1 was killed by SIGKILL")],
    ids=["out of memory", "at the start", "killed at the start"],
)  # fmt: skip
def test_a_rank_that_fails_ends_all_with_one_message(
    code: str, message: str, runs: Runs, tmp_path: Path
) -> None:
    started = time.monotonic()
    environment = patched(tmp_path, {1: code})

    ended = run_on(3, runs, tmp_path / "out", "--steps", "9", "--save-every", "1", **environment)

    assert ended.code == 1, ended.errors
    (error,) = errors_of(ended)
    assert "rank 1" in error
    assert message in error
    assert "Traceback" not in ended.errors
    assert time.monotonic() - started < 500  # nobody waits for a timeout


@pytest.mark.long
def test_a_killed_rank_is_named(runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "out"
    child = start(command_of(runs, out, "--gpus", "3", "--steps", "100000", "--save-every", "1"))
    wait_for_line(child, '"save"')
    ranks = rank_processes(child.pid)
    os.kill(ranks[2], signal.SIGKILL)

    ended = wait_for_exit(child)

    assert ended.code == 1
    (error,) = errors_of(ended)
    assert "rank 2 was killed by SIGKILL" in error
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
    last = max(int(path.name[-6:]) for path in out.glob("checkpoint-*"))
    resumed = run_command(
        runs.flags(out, *RESIDENT, *BATCH, "--resume", "--gpus", "1", "--steps", str(last + 1))
    )
    assert resumed.code == 0, resumed.errors


@pytest.mark.long
def test_a_batch_that_is_not_finite_ends_all_ranks_as_one(runs: Runs, tmp_path: Path) -> None:
    found = {}
    for world in (1, 2):
        out = tmp_path / str(world)
        found[world] = run_on(world, runs, out, "--lr", "1e30", "--warmup", "0", "--steps", "9")

    assert [each.code for each in found.values()] == [1, 1]
    assert len(errors_of(found[2])) == 1
    assert errors_of(found[1]) == errors_of(found[2])
    names = {path.name for path in (tmp_path / "1").iterdir()}
    assert {path.name for path in (tmp_path / "2").iterdir()} == names
    assert any(name.startswith("bad-batch") for name in names)
    assert checkpoints_of(tmp_path / "1") == checkpoints_of(tmp_path / "2")


@pytest.mark.long
def test_damage_that_only_one_rank_reads_leads_all_to_the_older_checkpoint(
    runs: Runs, alone: Path, tmp_path: Path
) -> None:
    out, more = tmp_path / "out", (*STEPS, "--eval-every", "2", "--save-best")
    assert run_on(1, runs, out, *more).code == 0
    damaged = out / "checkpoint-000005/optimizer.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)

    ended = run_on(2, runs, out, "--resume", "--gpus", "2")

    assert ended.code == 0, ended.errors
    assert "checkpoint-000005 is damaged" in ended.errors
    assert "training continues from step 4" in ended.errors
    assert checkpoints_of(out)["checkpoint-000005"] == checkpoints_of(alone)["checkpoint-000005"]


# Refusals.


@pytest.mark.long
def test_a_batch_with_fewer_micro_batches_than_ranks_is_refused(runs: Runs, tmp_path: Path) -> None:
    ended = run_on(3, runs, tmp_path / "out", "--batch", "4", "--steps", "1")

    assert ended.code == 1
    (error,) = errors_of(ended)
    assert "--batch 6" in error
    assert "--micro-batch 1" in error
    assert "--gpus 2" in error


def test_samples_on_several_ranks_are_refused(runs: Runs, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')

    ended = run_command(runs.flags(tmp_path / "out", "--gpus", "2", "--sample-prompts",
                                   str(prompts), "--steps", "1"))  # fmt: skip

    assert ended.code == 1
    assert "sample_prompts: cannot be combined with several GPUs" in ended.errors
