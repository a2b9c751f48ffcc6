"""Samples during training are the answers of the current weights, and change nothing."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from penstock.generate.streamed_forward import engine_forward
from tests.equivalence.runs import DRAM, Setup
from tests.train.conftest import STEPS
from tests.train.runs import RESIDENT, RunResult, Runs, contents, run_command


def test_samples_are_the_answers_of_the_model_and_change_nothing(
    whole: tuple[Path, RunResult], runs: Runs, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    requests = [{"prompt": "the capital of"}, {"messages": [{"role": "user", "content": "Hello!"}]}]
    prompts.write_text("\n".join(map(json.dumps, requests)))
    out = tmp_path / "out"
    ended = runs.run(
        out, *RESIDENT, "--steps", str(STEPS), "--save-every", "2", "--seed", "0",
        "--sample-prompts", str(prompts), "--sample-new", "6",
    )  # fmt: skip
    assert ended.code == 0, ended.errors
    samples = ended.of("sample")
    assert [event["step"] for event in samples] == [0, 0, STEPS, STEPS]
    assert contents(out) == contents(whole[0])

    again = run_command(["generate", str(out), "--file", str(prompts), "--max-new", "6", "--json"])
    answers = {e["id"]: e["text"] for e in again.events if e["event"] == "answer"}
    last = {event["prompt"]: event["text"] for event in samples[2:]}
    assert last["the capital of"] == answers[0]
    assert sorted(last.values()) == sorted(answers.values())


def test_a_bad_prompt_file_is_reported_before_the_first_step(runs: Runs, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}\n")
    out = tmp_path / "out"
    ended = runs.run(out, *RESIDENT, "--steps", "1", "--sample-prompts", str(prompts))

    assert ended.code == 1
    assert "prompts.jsonl:1: must have either" in ended.errors
    assert not out.exists()


def test_sampling_uses_no_more_device_memory_than_training(tmp_path: Path) -> None:
    """Gradient buffers are released for weights and cache, and return for the next step."""
    setup = Setup.of("llama")
    with setup.engine(DRAM, tmp_path) as engine:
        first, second = setup.batches(2)
        engine.step(first)
        planned = engine.device.memory().allocated
        with engine.gradient_buffers_released() as room:
            assert room > 0
            assert engine.device.memory().allocated == planned - room
            with engine_forward(engine) as forward:
                assert engine.device.memory().allocated == planned - room + forward.weights.nbytes
        assert engine.device.memory().allocated == planned
        loss = engine.step(second)
    with setup.engine(DRAM, tmp_path) as engine:
        engine.step(first)
        assert torch.equal(engine.step(second), loss)
