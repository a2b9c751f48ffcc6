"""`penstock profile`: programs that end normally, fail, or are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.observe.launch import claim_folder
from penstock.observe.run_files import read_run

PROGRAM = """
import os, sys
import program_setup  # set up by the program's own sitecustomize
assert program_setup.ran
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
{rest}
"""

STEPS = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
print("out", sys.argv[1:])
sys.exit(3)
"""

WAIT_FOR_PHASES = """
import glob, time
written = sys.argv[1] + "/*/phases.jsonl"
while not any(open(path).read().count("backward") > 2 for path in glob.glob(written)):
    time.sleep(0.05)
    model(torch.randn(2, 8)).sum().backward()
os.kill(os.getpid(), 9)
"""


def profile(
    tmp_path: Path, *command: str, options: tuple[str, ...] = (), path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    line = [
        sys.executable,
        "-m",
        "penstock",
        "profile",
        "-o",
        str(tmp_path / "run"),
        *options,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [*line, "--", *command], capture_output=True, text=True, check=False, env=environment
    )


def program(tmp_path: Path, rest: str) -> Path:
    """Write a program with its own sitecustomize, and return the directory of the latter."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "program_setup.py").write_text("ran = False\n")
    (own / "sitecustomize.py").write_text("import program_setup\nprogram_setup.ran = True\n")
    (tmp_path / "program.py").write_text(PROGRAM.format(rest=rest))
    return own


@pytest.mark.parametrize("leave", ["sys.exit", pytest.param("os._exit", marks=pytest.mark.long)])
def test_a_program_is_recorded_and_runs_unchanged(tmp_path: Path, leave: str) -> None:
    fork = "if os.fork() == 0: os._exit(0)\nos.wait()\n"
    own = program(tmp_path, fork + STEPS.replace("sys.exit", "sys.stdout.flush(); " + leave))

    command = (sys.executable, str(tmp_path / "program.py"), "--flag", "-o", "x")
    ended = profile(tmp_path, *command, path=own, options=("--exact", "2"))

    assert ended.returncode == 3, ended.stderr
    assert ", 4 steps, " in ended.stderr
    assert ended.stdout == "out ['--flag', '-o', 'x']\n"
    run = read_run(tmp_path / "run")
    assert run.observation.exit_code == 3
    assert run.observation.ended_by == "exit"
    assert run.observation.command == command
    assert [phase.step for phase in run.phases if phase.name == "update"] == [1, 2, 3, 4]
    assert [name.split("-")[0] for name in run.ranks] == ["process"]
    assert any(sample.cpu for sample in run.samples)
    trace = json.loads((tmp_path / "run/trace.json").read_text())
    assert trace["traceEvents"]


def test_a_killed_program_leaves_its_recording(tmp_path: Path) -> None:
    own = program(tmp_path, WAIT_FOR_PHASES)
    run_folder = str(tmp_path / "run")

    ended = profile(tmp_path, sys.executable, str(tmp_path / "program.py"), run_folder, path=own)

    assert ended.returncode == 128 + signal.SIGKILL, ended.stderr
    run = read_run(tmp_path / "run")
    assert run.observation.ended_by == "signal 9"
    assert run.observation.exit_code is None
    assert len([phase for phase in run.phases if phase.name == "backward"]) >= 3
    assert any("the recording has no end" in note for note in run.notes)
    assert "ended by signal 9" in ended.stderr


def test_only_the_machine_is_sampled_for_a_program_without_torch(tmp_path: Path) -> None:
    ended = profile(tmp_path, sys.executable, "-c", "print('hello')")

    assert (ended.returncode, ended.stdout) == (0, "hello\n")
    run = read_run(tmp_path / "run")
    assert run.phases == ()
    assert any("imported torch" in note for note in run.notes)


def test_a_missing_command_is_reported_without_a_traceback(tmp_path: Path) -> None:
    ended = profile(tmp_path, "no-such-program")

    assert ended.returncode == 1
    assert ended.stderr.startswith("error: no-such-program: cannot be run: No such file")


@pytest.mark.parametrize(
    "options",
    [("--interval", "0"), ("--exact", "0"), ("--exact", "a"), ("--limit", "1KiB")],
    ids=" ".join,
)
def test_wrong_options_are_usage_errors(tmp_path: Path, options: tuple[str, ...]) -> None:
    from penstock.cli import main

    line = ["profile", "-o", str(tmp_path / "run"), *options, "--", "true"]
    assert main.run(line) == 2
    assert not (tmp_path / "run").exists()


def test_signals_are_passed_on_to_the_program(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: (os.write(1, b'received\\n'), sys.exit(5)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    line = [sys.executable, "-m", "penstock", "profile", "-o", str(tmp_path / "run"), "--"]
    with subprocess.Popen(
        [*line, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as started:  # fmt: skip
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        os.kill(started.pid, signal.SIGINT)
        assert started.stdout.read() == "received\n"

    assert started.returncode == 5
    assert read_run(tmp_path / "run").observation.exit_code == 5


# Which processes are recorded.


def test_each_rank_is_recorded_once(tmp_path: Path) -> None:
    ranked = [{"RANK": "0"}, {"RANK": "1"}, {"RANK": "1"}, {}, {}]

    found = [claim_folder(tmp_path, env, ["python", "train.py"], all_=False) for env in ranked]

    names = [folder and folder.name for folder in found]
    assert names == ["rank-0", "rank-1", None, f"process-{os.getpid()}", None]


def test_workers_are_not_recorded(tmp_path: Path) -> None:
    spawned = [
        "python",
        "-c",
        "from multiprocessing.spawn import spawn_main",
        "--multiprocessing-fork",
    ]

    assert claim_folder(tmp_path, {"RANK": "0"}, spawned, all_=True) is None
    assert claim_folder(tmp_path, {}, spawned, all_=False) is None
