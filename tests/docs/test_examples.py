"""The scripts in examples/ run: on a CPU with small arguments here, and two of them on a GPU."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.units import MiB

EXAMPLES = Path(__file__).parents[2] / "examples"

TINY = ["--shape", "tiny", "--device", "cpu"]
"""Arguments that rehearse an example for GPUs on a CPU."""


@pytest.fixture(autouse=True)
def examples_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let examples import each other, as in `python examples/train.py`."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if not name.startswith(("penstock", "torch", "transformers")) and "." not in name:
            found = getattr(sys.modules[name], "__file__", None)
            if found and Path(found).parent == EXAMPLES:
                del sys.modules[name]


def run(name: str, *arguments: str) -> Any:
    return importlib.import_module(name).main(list(arguments))


def test_every_example_is_run_by_a_test() -> None:
    source = Path(__file__).read_text() + (EXAMPLES.parent / "Makefile").read_text()
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}

    assert len(scripts) >= 9
    missing = [s for s in scripts if f'"{s}"' not in source and f"examples/{s}.py" not in source]
    assert missing == []


def test_no_example_hides_a_module_of_python() -> None:
    """A script's directory comes first on sys.path: `profile.py` would break `import cProfile`."""
    assert not {path.stem for path in EXAMPLES.glob("*.py")} & sys.stdlib_module_names


def test_train_uses_every_tier_and_learns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = run("train", str(tmp_path), "--steps", "4", "--chats", "300")
    printed = capsys.readouterr().out

    assert loss < 7.2  # ln(vocabulary) is 7.6
    assert "nvme" in printed
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert importlib.import_module("make_demo_data")  # its data


def test_a_custom_loss_falls(capsys: pytest.CaptureFixture[str]) -> None:
    losses = run("custom_loss", "--steps", "6")

    assert losses[-1] < losses[0]
    assert "gradient norm" in capsys.readouterr().out


def test_profile_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run("profile_loop", str(tmp_path), "--steps", "4", "--width", "64")

    assert "<title>" in report.read_text()
    printed = capsys.readouterr().out
    assert all(phase in printed for phase in ("data", "forward", "backward", "update"))


def test_generate_gives_the_tokens_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    answers = run("generate", "--prompts", "6", "--new", "8")

    assert [len(tokens) for tokens in answers.values()] == [8] * 6
    assert "the same tokens: True" in capsys.readouterr().out


def test_placement_shows_where_pages_are(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("placement").main()

    assert "node 0" in capsys.readouterr().out


def test_examples_for_gpus_are_rehearsed_on_a_cpu() -> None:
    arguments = ["--context", "64", "--batch", "2", "--steps", "2"]
    budgets = ["--large-hbm", "64MiB", "--hbm", "4MiB", "--dram", "64MiB"]

    assert run("gpu_two_budgets", *TINY, *arguments, *budgets)
    peak = run("gpu_long_context", *TINY, "--context", "256", "--hbm", "64MiB", "--steps", "1")
    assert 0 < peak <= 64 * MiB


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks a machine without a GPU")
@pytest.mark.parametrize("name", ["gpu_two_budgets", "gpu_long_context"])
def test_examples_for_gpus_say_that_they_need_one(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(name)
    assert "needs a GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_two_budgets_on_a_gpu_give_the_same_bits() -> None:
    # The tiny model: drawing 1.2 B weights twice takes minutes next to other tests.
    arguments = ["--steps", "2", "--context", "512", "--hbm", "1500MiB", "--dram", "2GiB"]
    assert run("gpu_two_budgets", "--shape", "tiny", *arguments)


@pytest.mark.gpu
def test_a_long_context_on_a_gpu_stays_within_its_budget() -> None:
    # In a process of its own: the peak includes what earlier tests have left in the CUDA context.
    arguments = ["--context", "16384", "--hbm", "12GiB", "--steps", "1"]
    code = f"import gpu_long_context; print(gpu_long_context.main({arguments}))"
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=EXAMPLES, stdout=subprocess.PIPE, text=True, check=True
    ).stdout

    assert int(printed.split()[-1]) <= 12 * 1024 * MiB


@pytest.mark.long
def test_the_trainer_example_trains(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("trainer").main()

    assert "eval_loss" in capsys.readouterr().out
