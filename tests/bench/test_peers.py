"""Comparison with other systems: loss check, failed arms, the table, limits and settings."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import certificate
from bench.gpu_cells import PARTS, cells
from bench.peers import limits, render, run, table, zero
from bench.peers.work import DRAW, InitialWeights, Work, weight_of
from bench.shapes import SHAPES

TINY = Work(shape="tiny", context=32, batch=2, steps=4, warm_up=1)
FALLING = [7.0, 6.8, 6.6, 6.4]


# Loss check


def test_losses_close_to_the_baseline_are_the_same() -> None:
    assert render.parity([7.0, 6.801, 6.601, 6.4], FALLING) == "same"


@pytest.mark.parametrize(
    "losses",
    [[7.0, 7.0, 6.8, 6.6], [7.0, 7.0, 7.0, 7.0], [7.0, 6.8, math.nan, 6.4]],
    ids=["one step late", "never updated", "not a number"],
)
def test_diverging_losses_are_reported_with_the_step(losses: list[float]) -> None:
    assert render.parity(losses, FALLING).startswith(("step 2", "step 3"))


def test_a_single_step_is_too_few_to_judge() -> None:
    assert render.parity([7.0], FALLING) == "too few steps to say"


@pytest.mark.parametrize("arm", run.ARMS)
def test_every_arm_exists_and_has_a_name_in_the_table(arm: str) -> None:
    assert callable(run.find_arm(arm))
    assert render.NAMES[arm]


def run_in_process(arm: str, work: Work) -> run.Record:
    record = run.Record(arm, asdict(work))
    run.measure(run.find_arm(arm), work, record, None)
    return record


def test_penstock_and_plain_torch_do_the_same_work(one_thread: None) -> None:
    budgets = replace(TINY, options={"hbm": "64MiB", "dram": "128MiB"})
    plain, ours = run_in_process("plain", TINY), run_in_process("penstock", budgets)
    assert plain.losses[0] - plain.losses[-1] > 0.1
    assert render.parity(ours.losses, plain.losses) == "same"
    assert ours.steady["samples"] == TINY.steps - TINY.warm_up


# Initial weights


def test_an_initial_weight_depends_only_on_its_name() -> None:
    shape = (DRAW // 128 + 1, 128)
    first, second = weight_of("a", shape, TINY), weight_of("a", shape, TINY)
    assert torch.equal(first, second)
    assert not torch.equal(first, weight_of("b", shape, TINY))
    assert not torch.equal(first.view(-1)[:128], first.view(-1)[DRAW : DRAW + 128])


def test_initial_weights_keep_only_the_latest_tensor() -> None:
    weights = InitialWeights({"a": (4, 4), "b": (4,)}, TINY)
    assert weights["a"] is weights["a"]
    assert torch.equal(weights["b"], torch.ones(4, dtype=torch.bfloat16))


# Failed arms


@pytest.mark.parametrize(
    ("code", "state", "word"),
    [(-9, "killed", "SIGKILL"), (None, "out of time", "stopped"), (3, "failed", "status 3")],
)
def test_measurements_of_an_arm_that_failed_are_kept(
    tmp_path: Path, code: int | None, state: str, word: str
) -> None:
    record = run.Record("plain", asdict(TINY), state="stepping", step_seconds=[1.0])
    record.save(tmp_path / "record.json")
    found = table.conclude("plain", tmp_path / "record.json", code, 12.0)
    assert (found["state"], found["step_seconds"]) == (state, [1.0])
    assert word in found["problem"]


def test_the_lock_of_a_killed_compilation_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    lock = tmp_path / "extensions/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    table.environment("deepspeed-zero3", tmp_path)
    assert not lock.exists()


def test_a_call_whose_arms_cannot_run_ends_before_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a rented GPU, starting an arm that lacks a package takes a minute."""
    monkeypatch.setattr(table, "run_table", lambda args: pytest.fail("an arm was started"))
    monkeypatch.setattr(run, "_PACKAGES", {"plain-liger": "no_such_package"})

    with pytest.raises(SystemExit, match="plain-liger needs no_such_package"):
        table.main(["--arms", "penstock", "--baseline", "plain-liger"])
    with pytest.raises(SystemExit, match="there is no file"):
        table.main(["--arms", "penstock", "--plan", str(tmp_path / "none.json")])


def test_the_scratch_directory_is_made(tmp_path: Path) -> None:
    scratch = tmp_path / "a/b"

    table.check(table.arguments(["--arms", "plain", "--scratch", str(scratch)]))

    assert scratch.is_dir()


def test_an_arm_without_a_record_has_failed(tmp_path: Path) -> None:
    assert table.conclude("plain", tmp_path / "none.json", 1, 1.0)["state"] == "failed"


def test_an_arm_runs_in_its_own_process_and_reports_why_it_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = table.run_arm("fsdp2", ["--shape", "tiny", "--dtype", "fp16"], 120, tmp_path)
    assert found["state"] == "failed"
    assert "bf16 only" in found["problem"]


# Table


def arm_of(name: str, step: float, **more: Any) -> dict[str, Any]:
    steady = {"p20": step, "p50": step, "p80": step, "samples": 3}
    record = run.Record(name, asdict(replace(TINY, shape="3b")), state="done", steady=steady)
    return asdict(record) | {"host_peak_nbytes": 2 * 3085846528, "parity": "same"} | more


def test_a_call_without_plain_torch_is_compared_with_its_first_arm() -> None:
    call: dict[str, Any] = {"arms": [arm_of("plain-liger", 2.0), arm_of("penstock", 1.0)]}
    call["arms"][0]["losses"], call["arms"][1]["losses"] = [7.0, 6.0, 5.0], [7.0, 6.0, 3.0]

    render.check_losses(call)
    text = render.markdown({"results": {"calls": [call]}})

    assert call["arms"][0]["parity"] == "same"
    assert call["arms"][1]["parity"] == "step 3: 3.0000, not 5.0000"
    assert "| 0.50 |" in text


def test_ratios_use_the_baseline_of_the_same_call() -> None:
    calls = [
        {"arms": [arm_of("plain", 1.0), arm_of("penstock", 1.1)]},
        {"arms": [arm_of("plain", 2.0), arm_of("fsdp2", 6.0, parity="step 2: 7, not 6")]},
    ]
    text = render.markdown({"results": {"calls": calls}})
    rows = {line.split(" | ")[0]: line.split(" | ") for line in text.splitlines()[2:]}
    assert rows["| **Penstock**"][2] == "1.10"
    assert rows["| FSDP2, CPU offload, fused CPU AdamW"][2] == "3.00"
    assert "step 2: 7, not 6" in text
    assert rows["| **Penstock**"][5] == "2.0"  # bytes per parameter
    assert text.count("plain torch (eager, checkpointing)") == 1


def test_an_arm_without_steps_has_a_row_that_says_how_it_ended() -> None:
    dead = {"arm": "deepspeed-zero3", "state": "killed", "problem": "by SIGKILL"}
    assert "killed by SIGKILL" in render.row(dead, 1.0)


def test_a_results_file_is_rendered_without_running_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "peers.json"
    path.write_text(json.dumps({"results": {"calls": [{"arms": [arm_of("plain", 1.0)]}]}}))
    table.main(["--markdown", str(path)])
    assert "plain torch (eager, checkpointing)" in capsys.readouterr().out


@pytest.mark.parametrize(("shape", "billions"), [("3b", 3.086), ("8b", 8.03), ("32b", 32.76)])
def test_parameter_counts_match_the_published_models(shape: str, billions: float) -> None:
    assert round(render.parameters(shape) / 1e9, 3) == pytest.approx(billions, abs=0.005)


# DeepSpeed settings


@pytest.mark.parametrize("shape", SHAPES)
def test_a_zero_infinity_slot_holds_the_largest_tensor(shape: str) -> None:
    work = replace(TINY, shape=shape)
    zero_part = zero.infinity_config(work, weights=True)["zero_optimization"]
    size = zero_part["offload_param"]["buffer_size"]
    assert size >= work.config.vocab_size * work.config.hidden_size
    assert size >= zero_part["sub_group_size"]


def test_the_reuse_distance_keeps_one_layer_but_not_two() -> None:
    work = replace(TINY, shape="8b")
    layer = zero.layer_elements(work)
    assert layer == 218112000
    assert layer < zero.buckets(work)["stage3_max_reuse_distance"] < 2 * layer


def test_the_initial_fp16_loss_scale_skips_no_step() -> None:
    assert zero.base_config(replace(TINY, dtype="fp16"))["fp16"]["initial_scale_power"] < 16


# Limits


def test_doubling_stops_at_the_first_failure() -> None:
    found = limits.doublings(
        lambda value: {"ok": value <= 16, "seconds": 0.0}, 4, 1 << 20, time.monotonic() + 60
    )
    assert [attempt["value"] for attempt in found] == [4, 8, 16, 32]
    assert limits.largest(found) == 16


def test_doubling_stops_if_the_next_attempt_would_take_too_long() -> None:
    found = limits.doublings(
        lambda _: {"ok": True, "seconds": 100.0}, 4, 1 << 20, time.monotonic() + 60
    )
    assert [attempt["ok"] for attempt in found] == [True, False]
    assert found[-1]["problem"] == "out of time"


# GPU table


def test_cells_have_unique_names_and_fit_into_a_call() -> None:
    found = list(cells())
    assert len({cell.name for cell in found}) == len(found)
    assert {cell.part for cell in found} <= set(PARTS)
    # A whole step at 524,288 tokens takes longer, and has to be called with a larger --limit.
    assert [cell.name for cell in found if cell.seconds >= 570] == ["8b-1x524288"]


def test_the_environment_overrides_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "0123456789ab")
    assert certificate.commit() == "0123456789ab"
    monkeypatch.delenv("BENCH_COMMIT")
    assert certificate.commit() != "0123456789ab"
