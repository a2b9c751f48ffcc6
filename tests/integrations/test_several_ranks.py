"""A trainer under torchrun: any number of processes gives the result of one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.distributed.thread_ranks import ThreadRanks
from penstock.errors import BatchError, EngineError, SettingsError
from penstock.integrations.several_ranks import check_launch, check_together
from tests.integrations import ranks_run
from tests.support import fork_server
from tests.support.ranks import on_each_rank
from tests.support.trainers import TIMES

pytestmark = pytest.mark.usefixtures("one_thread")

SAVES = {
    "max_steps": 4,
    "gradient_accumulation_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
}
OWN_FILES = ("complete.json", "trainer_state.json", "training_args.bin")
"""Files of a checkpoint that have the batch size of each process, or the checksum of one that
does."""


def options_for(world: int, train: int = 6, evaluate: int = 6, **more: Any) -> dict[str, Any]:
    """Return options in which all processes together have batches of so many sequences."""
    sizes = {
        "per_device_train_batch_size": train // world,
        "per_device_eval_batch_size": evaluate // world,
    }
    own = {"args": SAVES | sizes | more.pop("args", {}), "penstock": {"micro_batch": 2}}
    return own | more


def launch(world: int, out: Path, options: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run the script in so many processes."""
    out.mkdir(exist_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = ["-m", "tests.integrations.ranks_run", str(out), json.dumps(options)]
    return subprocess.run(
        [*torchrun, "--nproc-per-node", str(world), *script], check=False, capture_output=True,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip


def launch_forks(world: int, out: Path, options: dict[str, Any]) -> None:
    """Run the script in so many processes, with the variables that torchrun sets."""
    out.mkdir(exist_ok=True)
    script = ["-m", "tests.integrations.ranks_run", str(out), json.dumps(options)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = launched(world) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        fork_server.start(script, env={**os.environ, **common, "GLOO_SOCKET_IFNAME": "lo",
                                       "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]  # fmt: skip
    for rank in ranks:
        _, errors = rank.communicate()
        assert rank.returncode == 0, errors[-4000:]


def run(
    world: int, out: Path, options: dict[str, Any], *, torchrun: bool = True
) -> list[dict[str, Any]]:
    """Train in so many processes, and return what each of them saw."""
    if world == 1:
        return [json.loads(json.dumps(ranks_run.train(out, options)))]
    if torchrun:
        done = launch(world, out, options)
        assert done.returncode == 0, done.stderr[-4000:]
    else:
        launch_forks(world, out, options)
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(world)]


def without_times(values: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in values.items() if not any(time in n for time in TIMES)}


def assert_same(one: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Assert that every rank saw what a single process sees."""
    for rank, found in enumerate(ranks):
        assert [without_times(e) for e in found["log"]] == [without_times(e) for e in one["log"]]
        assert without_times(found["metrics"]) == without_times(one["metrics"])
        assert found["sums"] == one["sums"]
        assert found["total_flos"] == one["total_flos"]
        assert (found["rank"], found["zero"]) == (rank, rank == 0)
        assert [[s[0], *s[2:]] if len(s) > 2 else s for s in found["seen"]] == [
            [s[0], rank == 0] if len(s) > 2 else s for s in one["seen"]
        ]


def files_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        p.name: p.read_bytes() for p in folder.iterdir() if p.name not in OWN_FILES
    }
    if config := found.get("adapter_config.json"):
        # After training, PEFT writes it: a set of modules, in another order in every process.
        fields = json.loads(config)
        found["adapter_config.json"] = fields | {"target_modules": sorted(fields["target_modules"])}
    return found


@pytest.mark.parametrize(
    "torchrun", [False, pytest.param(True, marks=pytest.mark.long)], ids=["forks", "torchrun"]
)
def test_two_processes_train_as_one(torchrun: bool, tmp_path: Path) -> None:
    (one,) = run(1, tmp_path / "one", options_for(1, metrics=True))

    ranks = run(2, tmp_path / "two", options_for(2, metrics=True), torchrun=torchrun)

    assert_same(one, ranks)
    for folder in ("checkpoint-2", "checkpoint-4", "trained"):
        assert files_of(tmp_path / "two" / folder) == files_of(tmp_path / "one" / folder)
    assert not list((tmp_path / "two").glob(".*"))


def test_processes_evaluate_an_iterable_dataset_as_one_evaluates_a_list(tmp_path: Path) -> None:
    """Its last batch is not full."""
    options: dict[str, Any] = {"args": {"max_steps": 1}, "metrics": True}
    (one,) = run(1, tmp_path / "one", options_for(1, **options))

    options |= {"iterable": True, "penstock": {"micro_batch": 2, "context": 64}}
    for world in (1, 2):
        ranks = run(world, tmp_path / f"{world}", options_for(world, **options), torchrun=False)
        for found in ranks:
            assert without_times(found["metrics"]) == without_times(one["metrics"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "more"),
    [
        pytest.param(3, {"family": "qwen3", "examples": 25, "penstock": {"micro_batch": 1}},
                     id="3 processes, a last batch of one sequence"),
        pytest.param(2, {"family": "gemma3", "penstock": {"micro_batch": 1, "hbm": "5MiB",
                                                         "dram": "2MiB"}}, id="other budgets"),
        pytest.param(2, {"lora": True}, id="adapters that each process draws anew"),
        pytest.param(3, {"args": {"train_sampling_strategy": "group_by_length"}}, id="by length"),
        pytest.param(2, {"args": {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch",
                                  "save_strategy": "epoch", "load_best_model_at_end": True,
                                  "dataloader_num_workers": 1}}, id="epochs, best model"),
    ],
)  # fmt: skip
def test_processes_train_as_one(world: int, more: dict[str, Any], tmp_path: Path) -> None:
    (one,) = run(1, tmp_path / "one", options_for(1, **more))

    assert_same(one, run(world, tmp_path / "more", options_for(world, **more)))
    saved = tmp_path / "one/trained"
    assert files_of(tmp_path / "more/trained") == files_of(saved)


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"packing": True, "gradient_accumulation_steps": 2}])
def test_processes_train_as_one_with_trl(more: dict[str, Any], tmp_path: Path) -> None:
    """Token accuracy and entropy are those of the whole batch."""
    pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
    args = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"} | more
    options = {"sft": True, "args": args, "penstock": {"micro_batch": 1}}
    (one,) = run(1, tmp_path / "one", options_for(1, **options))

    ranks = run(2, tmp_path / "two", options_for(2, **options))

    assert_same(one, ranks)
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= one["log"][0].keys()
    assert files_of(tmp_path / "two/trained") == files_of(tmp_path / "one/trained")


@pytest.mark.long
def test_a_run_continues_on_other_numbers_of_processes(tmp_path: Path) -> None:
    out, names = tmp_path / "out", {"model": {"attn_pdrop": 0.0}, "family": "gpt2"}
    args = {"max_steps": 6, "neftune_noise_alpha": 5.0}
    run(1, tmp_path / "one", options_for(1, args=args, **names))

    stopped = launch(2, out, options_for(2, args=args, kill=3, **names))
    assert stopped.returncode == 1
    assert "lost rank 1: its process ended" in stopped.stderr
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-2"]
    run(3, out, options_for(3, args=args, resume=True, **names))

    assert files_of(out / "trained") == files_of(tmp_path / "one/trained")
    for step in (4, 6):
        folder = f"checkpoint-{step}"
        assert files_of(out / folder) == files_of(tmp_path / "one" / folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"save_alone": 2}, "All ranks must make the same calls"),
        ({"sharded": True}, "ranks 0 and 1 have different batches"),
        ({"penstock": {}}, "Pass PenstockConfig(micro_batch=6)"),
    ],
    ids=["saves on one rank", "a dataset that is sharded", "too few micro-batches"],
)
def test_what_processes_cannot_do_is_an_error_on_all(
    more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    done = launch(2, tmp_path / "out", options_for(2, **more))

    assert done.returncode == 1
    assert message in done.stderr


# Without processes.


def launched(world: int) -> dict[str, str]:
    return {
        "RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 1}, "the launcher has started 2 processes; set use_cpu=True"),
        ({"accelerator_config": SimpleNamespace(split_batches=True)}, "divides each batch"),
        ({"train_sampling_strategy": "batch_rebalance"}, "every rank needs all of it"),
    ],
)
def test_arguments_that_divide_the_data_are_refused(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in launched(2).items():
        monkeypatch.setenv(name, value)
    args = SimpleNamespace(**({"world_size": 2, "save_on_each_node": False} | changes))

    with pytest.raises(SettingsError, match=message):
        check_launch(args)


def test_ranks_must_make_the_same_calls_with_the_same_batch() -> None:
    group, batch = ThreadRanks(3), {"input_ids": torch.arange(6).view(2, 3)}

    def work(ranks: Any) -> list[str]:
        errors = []
        check_together(ranks, "takes a training step", batch)
        other = {"input_ids": batch["input_ids"].T} if ranks.rank == 2 else batch
        for call, used in (("evaluates a batch", other), (f"saves {ranks.rank // 2}", batch)):
            try:
                check_together(ranks, call, used)
            except (BatchError, EngineError) as error:
                errors.append(str(error))
        return errors

    for rank, (batches, calls) in enumerate(on_each_rank(group, work)):
        assert batches.startswith("ranks 0 and 2 have different batches")
        other = 0 if rank == 2 else 2
        assert f"rank {other} saves {other // 2}, and rank {rank} saves {rank // 2}" in calls
