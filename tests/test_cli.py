"""The command line: flags frozen, exit codes kept, JSON alone on standard output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from penstock import __version__, cli
from penstock.machine import Machine

FLAGS = {
    "": {"--version", "--json", "--help"},
    "doctor": {"--json", "--help"},
    "probe": {"--out", "-o", "--quick", "--storage", "--plot", "--json", "--help"},
}


def flags_of(command: object) -> set[str]:
    found = {"--help"}
    for parameter in command.params:  # type: ignore[attr-defined]
        found |= set(parameter.opts) | set(parameter.secondary_opts)
    return found


def test_commands_and_flags_are_frozen() -> None:
    group = typer.main.get_command(cli.app)
    found = {"": flags_of(group)}
    found |= {name: flags_of(command) for name, command in group.commands.items()}  # type: ignore[attr-defined]

    assert found == FLAGS


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock {__version__}\n"

    assert cli.run(["--version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"penstock": __version__}


@pytest.mark.parametrize("arguments", [["nonsense"], ["probe", "--nonsense"], ["doctor", "extra"]])
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 2
    assert capsys.readouterr().out == ""


def test_what_a_user_can_mend_is_1_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["probe", "--quick", "-o", str(tmp_path / "missing" / "machine.json")]) == 1

    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert "cannot be written" in said.err
    assert "Traceback" not in said.err


def test_a_bug_is_70_with_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.doctor.examine", lambda: 1 / 0)

    assert cli.run(["doctor"]) == 70

    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said
    assert "bug in Penstock" in said


def test_an_interrupted_probe_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.probe.probe", interrupted)

    assert cli.run(["probe", "-o", str(tmp_path / "machine.json")]) == 130

    assert "nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_doctor_prints_json_alone() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )

    findings = json.loads(run.stdout)
    bad = [finding for finding in findings if finding["status"] == "bad"]
    assert run.returncode == (1 if bad else 0)
    assert {"check", "status", "found"} <= set(findings[0])


def test_a_probe_writes_the_machine_it_prints_and_a_picture(tmp_path: Path) -> None:
    out, plot = tmp_path / "machine.json", tmp_path / "machine.png"
    command = ["probe", "--quick", "-o", str(out), "--plot", str(plot), "--json"]
    run = subprocess.run(
        [sys.executable, "-m", "penstock.cli", *command, "--storage", str(tmp_path)],
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
