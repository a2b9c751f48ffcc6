"""The command line: stable flags and exit codes, help, completion, and JSON-only output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock import __version__
from penstock.checkpoint.errors import CheckpointWarning
from penstock.cli import main
from penstock.errors import PenstockError
from penstock.machine.machine import Figure, Machine, MemoryNode, MemoryRate
from penstock.machine.presets import preset
from penstock.probe import ProbeResult, storage
from penstock.units import GiB, MiB
from tests.support.character_devices import make_device

FLAGS = {
    "": {"--version", "--json", "--install-completion", "--show-completion", "--help"},
    "doctor": {"--json", "--help"},
    "probe": {"--out", "-o", "--quick", "--storage", "--plot", "--json", "--help"},
    "plan": {
        *{"model", "--context", "--batch", "--hbm", "--dram", "--cxl", "--nvme", "--machine"},
        *{"--output", "-o", "--moments", "--dtype", "--micro-batch", "--clip", "--steps"},
        *{"--freeze", "--blocks", "--vary", "--explain", "--json", "--help"},
        *{"--gpus", "--machines", "--transport"},
        *{"--revision", "--trust-remote-code", "--model-config", "--deterministic"},
        *{"--no-deterministic", "--config", "--data", "--overlong", "--skip-bad-lines", "--cache"},
        *{"--eval-split", "--epochs", "--seed", "--data-weights", "--columns", "--streaming"},
        *{"--label-smoothing", "--neftune-noise-alpha", "--lora", "--quantize"},
        *{"--optimizer", "--momentum"},
    },
    "merge": {"directory", "--into", "--base", "--trust-remote-code", "--json", "--help"},
    "check": {"directory", "--json", "--help"},
    "machines": {"--json", "--help"},
    "fit": {
        *{"models", "--context", "--batch", "--micro-batch", "--dtype", "--hbm", "--dram", "--cxl"},
        *{"--nvme", "--moments", "--machine", "--json", "--help", "--gpus", "--transport"},
        *{"--optimizer", "--momentum"},
    },
    "train": {
        *{"model", "--data", "--out", "--context", "--batch", "--epochs", "--steps"},
        *{"--micro-batch", "--hbm", "--dram", "--cxl", "--nvme", "--moments", "--plan", "--lr"},
        *{"--optimizer", "--momentum", "--nesterov", "--no-nesterov"},
        *{"--schedule", "--warmup", "--betas", "--weight-decay", "--clip", "--dtype", "--freeze"},
        *{"--model-config", "--init", "--revision", "--trust-remote-code", "--eval-data"},
        *{"--eval-split", "--eval-every", "--sample-prompts", "--sample-new", "--overlong"},
        *{"--skip-bad-lines", "--cache", "--blocks", "--data-weights", "--columns", "--streaming"},
        *{
            "--save-every",
            "--keep",
            "--keep-resumable",
            "--save-weights-only",
            "--on-nonfinite",
            "--deterministic",
        },
        *{"--no-deterministic", "--min-lr", "--decay", "--save-best", "--hub-layout"},
        *{"--self-check", "--no-self-check", "--label-smoothing", "--neftune-noise-alpha"},
        *{"--store-checksums", "--no-store-checksums", "--gpus", "--transport", "--lora"},
        "--quantize",
        *{
            "--seed",
            "--log",
            "--log-project",
            "--log-name",
            "--profile",
            "--config",
            "--resume",
            "--json",
            "--help",
        },
    },
    "profile": {
        *{"command", "--out", "-o", "--interval", "--exact", "--limit", "--machine"},
        *{"--all-processes", "--help"},
    },
    "report": {"run", "--out", "-o", "--json", "--help"},
    "compare": {"before", "after", "--out", "-o", "--json", "--help"},
    "generate": {
        *{"model", "--prompt", "--file", "--chat", "--max-new", "--temperature", "--top-k"},
        *{"--top-p", "--seed", "--stop", "--hbm", "--batch", "--context", "--prefill-chunk"},
        *{
            "--no-graphs",
            "--compile",
            "--dtype",
            "--revision",
            "--trust-remote-code",
            "--blocks",
            "--json",
            "--help",
        },
    },
    "data show": {
        *{"file", "--model", "--context", "--count", "--overlong", "--skip-bad-lines", "--cache"},
        *{"--revision", "--trust-remote-code", "--json", "--help", "--columns", "--streaming"},
    },
    "store ls": {"paths", "--json", "--help"},
    "store rm": {"paths", "--force", "--json", "--help"},
    "bench storage": {"path", "--size", "--passes", "--erase-device", "--json", "--help"},
}


# `plan` accepts all settings of `train`, so that one word of a command line may be replaced. Its
# help shows those that a plan depends on.
FLAGS["plan"] |= FLAGS["train"] - {"--plan", "--resume", "--profile"}


def flags_of(command: object) -> set[str]:
    found = {"--help"}
    for parameter in command.params:  # type: ignore[attr-defined]
        found |= set(parameter.opts) | set(parameter.secondary_opts)
    return found


def commands_of(command: object, name: str = "") -> dict[str, set[str]]:
    """Return the flags of every command that can be run, by its full name."""
    subcommands = getattr(command, "commands", None)
    found = {name: flags_of(command)} if subcommands is None or name == "" else {}
    for word, inner in (subcommands or {}).items():
        found |= commands_of(inner, f"{name} {word}".strip())
    return found


def test_commands_and_flags_are_frozen() -> None:
    assert commands_of(typer.main.get_command(main.app)) == FLAGS


def test_help_groups_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0

    printed = capsys.readouterr().out
    positions = [printed.index(title) for title in ("Train", "Machine", "Observe")]
    assert positions == sorted(positions)


def test_help_groups_the_flags_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["train", "--help"]) == 0

    printed = capsys.readouterr().out
    for panel in ("Model and data", "Schedule", "Memory", "Checkpoints", "Evaluation", "Logging"):
        assert f" {panel} " in printed
    assert "[default: (on)]" in printed
    assert "default: (store_checksums" not in printed


@pytest.mark.parametrize(
    ("line", "word", "expected"),
    [("penstock tr", "1", "train"), ("penstock train --store", "2", "--store-checksums")],
)
def test_the_shell_completes_commands_and_flags(line: str, word: str, expected: str) -> None:
    environment = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": word}

    run = in_child(environment=environment)

    assert run.stdout.split() == [expected], run.stderr


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock {__version__}\n"

    assert main.run(["--version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"penstock": __version__}


@pytest.mark.parametrize("arguments", [["nonsense"], ["probe", "--nonsense"], ["doctor", "extra"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(arguments) == 2
    assert capsys.readouterr().out == ""


def test_a_user_error_exits_with_1_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["probe", "--quick", "-o", str(tmp_path / "missing" / "machine.json")]) == 1

    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert "cannot be written" in printed.err
    assert "Traceback" not in printed.err


def test_notes_of_an_error_are_printed_below_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        problem = PenstockError("the first tensor was refused")
        problem.add_note("the second one was refused as well")
        raise problem

    monkeypatch.setattr(main, "app", fail)

    assert main.run(["machines"]) == 1
    message = capsys.readouterr().err.splitlines()
    assert message == [
        "error: the first tensor was refused",
        "also: the second one was refused as well",
    ]


def test_a_bug_exits_with_70_and_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.doctor.examine", lambda: 1 / 0)

    assert main.run(["doctor"]) == 70

    message = capsys.readouterr().err
    assert "ZeroDivisionError" in message
    assert "bug in Penstock" in message


def test_an_interrupted_probe_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.probe.probe", interrupted)

    assert main.run(["probe", "-o", str(tmp_path / "machine.json")]) == 130

    assert "nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_doctor_prints_only_json() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "penstock", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )

    findings = json.loads(run.stdout)
    bad = [finding for finding in findings if finding["status"] == "bad"]
    assert run.returncode == (1 if bad else 0)
    assert {"check", "status", "found"} <= set(findings[0])


def in_child(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **options.pop("environment", {})}
    command = [sys.executable, "-m", "penstock", *arguments]
    output = {"stdout": subprocess.PIPE, **options}
    return subprocess.run(
        command, env=environment, stderr=subprocess.PIPE, text=True, check=False, **output
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the probe by a stub, and record its calls."""
    calls = []

    def measure(*_: object) -> ProbeResult:
        calls.append("probe")
        rate = MemoryRate(operation="read", threads=1, bytes_per_second=Figure.from_number(1e9))
        node = MemoryNode(id=0, kind="dram", capacity=GiB, rates=(rate,))
        return ProbeResult(machine=Machine(nodes=(node,)), notes=(), seconds=1.0)

    monkeypatch.setattr("penstock.probe.probe", measure)
    return calls


def test_a_full_disk_exits_with_1(
    measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = make_device(tmp_path, "full")
    assert main.run(["probe", "-o", str(full)]) == 1
    message = capsys.readouterr().err
    assert message == f"error: {full}: cannot be written: No space left on device\n"


def test_a_device_is_written_to_and_not_replaced(measured: list[str], tmp_path: Path) -> None:
    null = make_device(tmp_path, "null")
    assert main.run(["probe", "-o", str(null)]) == 0
    assert null.is_char_device()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-o", "/proc/x"], "/proc/x cannot be written"),
        (["-o", "."], "cannot be written (Is a directory)"),
        (["--plot", "p.xyz"], "p.xyz cannot be plotted: its name must end in one of"),
        (["--plot", "pict"], "pict cannot be plotted"),
        (["--plot", "gone/p.png"], "gone/p.png cannot be written (No such file or directory)"),
    ],
)
def test_an_unwritable_path_is_reported_before_the_measurement(
    arguments: list[str], words: str, measured: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main.run(["probe", *arguments]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert words in message
    assert measured == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("problem", "code", "words"),
    [
        (OSError(30, "Read-only file system", "/x"), 1, "error: /x: Read-only file system; mount"),
        (OSError(28, "No space left on device"), 1, "error: No space left on device"),
        (OSError(18, "Cross-device link", "/x", None, "/y"), 1, "error: /x -> /y: Cross-device"),
        (OSError(9, "Bad file descriptor"), 70, "bug in Penstock"),
    ],
)
def test_an_os_error_that_names_a_file_is_a_user_error(
    problem: OSError, code: int, words: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail() -> None:
        raise problem

    monkeypatch.setattr("penstock.doctor.examine", fail)
    assert main.run(["doctor"]) == code
    assert words in capsys.readouterr().err


SHOW = """
import sys
from penstock.cli import main as cli
from penstock.machine.machine import Figure, Machine, MemoryNode, MemoryRate
from penstock.probe import ProbeResult
import penstock.probe
figure = Figure(median=1e9, low=5e8, high=2e9, samples=3)
rate = MemoryRate(operation="read", threads=1, bytes_per_second=figure)
node = MemoryNode(id=0, kind="dram", capacity=1 << 30, rates=(rate,))
result = ProbeResult(machine=Machine(nodes=(node,)), notes=("caf\\u00e9",), seconds=1.0)
penstock.probe.probe = lambda *_: result
sys.argv = ["penstock", "probe", "-o", sys.argv[1]]
cli.main()
"""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
def test_a_table_uses_only_characters_of_the_encoding(encoding: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SHOW, str(tmp_path / "m.json")],
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "80"},
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    text = run.stdout.decode(encoding)
    assert ("+-75%" in text) == (encoding == "ascii")
    assert ("±75%" in text) == (encoding != "ascii")
    header = next(line for line in text.splitlines() if "read" in line)
    row = next(line for line in text.splitlines() if "75%" in line)
    assert header.rindex("read") + 4 == row.index("75%") + 3  # the columns are still aligned


@pytest.mark.parametrize("unbuffered", ["", "1"])  # fails at exit, or at the first print
def test_a_closed_pipe_causes_no_traceback(unbuffered: str) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        buffering = {"PYTHONUNBUFFERED": unbuffered}
        run = in_child("doctor", "--json", stdout=closed, environment=buffering)
    assert (run.returncode, run.stderr) == (1, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_standard_output_is_reported_in_one_line(unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        run = in_child("--version", stdout=full, environment={"PYTHONUNBUFFERED": unbuffered})
    assert run.returncode == 1
    assert re.fullmatch(r"error: (standard output: )?No space left on device\n", run.stderr)


PROBE_STREAMS = """
import os, sys
from penstock.cli import main
def run(arguments):
    with open(arguments[0], "w") as file:
        names = [os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)]
        print(names, sys.stdout.isatty(), sys.stderr.isatty(), file.fileno() > 2, file=file)
    print("to nobody")
    os.write(2, b"to nobody")
    return 0
main.run = run
main.main()
"""


def test_closed_standard_streams_are_opened_before_any_file(tmp_path: Path) -> None:
    """A file would get the number of standard error, and every message that is printed there."""
    script, found = tmp_path / "script.py", tmp_path / "found"
    script.write_text(PROBE_STREAMS)

    ended = subprocess.run(
        f"exec {sys.executable} {script} {found} <&- >&- 2>&-", shell=True, check=False
    )

    assert ended.returncode == 0
    assert found.read_text() == "['/dev/null', '/dev/null', '/dev/null'] False False True\n"


def test_the_package_metadata_takes_the_version_from_its_module() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())

    assert project["project"]["dynamic"] == ["version"]
    source = project["tool"]["scikit-build"]["metadata"]["version"]["input"]
    assert f'__version__ = "{__version__}"' in (Path(__file__).parents[2] / source).read_text()


def test_a_probe_writes_the_machine_it_prints_and_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = ProbeResult(machine=preset("desktop-24gb"), notes=(), seconds=1.0)
    monkeypatch.setattr("penstock.probe.probe", lambda *_: measured)
    out, plot = tmp_path / "machine.json", tmp_path / "machine.png"
    command = ["probe", "--quick", "-o", str(out), "--plot", str(plot), "--json"]
    monkeypatch.setattr(sys, "argv", ["penstock", *command])

    assert main.run(command) == 0

    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())
    machine = Machine.load(out)
    assert machine.nodes == preset("desktop-24gb").nodes
    assert machine.made.command.startswith("penstock probe --quick")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["machine.json", "machine.png"]


@pytest.mark.long
def test_a_probe_of_this_machine_writes_what_it_measures(tmp_path: Path) -> None:
    if storage.max_file_size(tmp_path) < 16 * MiB:
        pytest.skip(f"{tmp_path} has too little free space to measure with")
    out, plot = tmp_path / "machine.json", tmp_path / "machine.png"
    command = ["probe", "--quick", "-o", str(out), "--plot", str(plot), "--json"]
    run = subprocess.run(
        [sys.executable, "-m", "penstock", *command, "--storage", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )

    assert json.loads(run.stdout) == json.loads(out.read_text())
    machine = Machine.load(out)
    assert all(node.rates and node.latency for node in machine.nodes if node.cpus)
    assert machine.storage[0].rates
    assert machine.made.command.startswith("penstock probe --quick")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["machine.json", "machine.png"]


def test_a_warning_of_penstock_is_one_line_without_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(_: list[str]) -> int:
        text = warnings.formatwarning("3 tensors are ignored", CheckpointWarning, "a.py", 7)
        print(text + warnings.formatwarning("other", UserWarning, "a.py", 7, ""), end="")
        return 0

    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # restores it
    monkeypatch.setattr(main, "run", command)
    with pytest.raises(SystemExit):
        main.main()

    assert capsys.readouterr().out == (
        "warning: 3 tensors are ignored\na.py:7: UserWarning: other\n"
    )
