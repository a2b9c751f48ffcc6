"""`penstock report` and `penstock compare` with valid, damaged and missing runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main
from tests.observe.synthetic_runs import hostile, make_run, offloaded, on_cpu, streamed, write_run


def test_a_report_is_written_into_the_run_and_summarized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(offloaded(), tmp_path / "run")

    assert main.run(["report", str(run)]) == 0

    output = capsys.readouterr().out
    assert "No single bottleneck" in output
    assert "GPU idle for 600 ms per step during the CPU optimizer sweep" in output
    html = (run / "report.html").read_text()
    assert html.startswith("<!doctype html>")
    assert sorted(path.name for path in run.iterdir()) == [
        "events.jsonl", "observe.json", "phases.jsonl", "report.html", "samples.jsonl",
    ]  # fmt: skip


def test_the_output_directory_of_a_training_names_its_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(offloaded(), tmp_path / "out" / "profile")

    assert main.run(["report", str(tmp_path / "out")]) == 0
    assert (run / "report.html").exists()
    assert main.run(["compare", str(tmp_path / "out"), str(run)]) == 0
    assert main.run(["report", str(tmp_path)]) == 1
    assert "is not an observed run" in capsys.readouterr().err


def test_a_training_without_a_profile_is_told_how_to_record_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("{}")

    assert main.run(["report", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "`penstock train --profile 20`" in error
    assert "penstock profile" not in error


def test_json_is_the_only_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(streamed(), tmp_path / "run")
    out = tmp_path / "elsewhere.html"

    assert main.run(["report", str(run), "--json", "-o", str(out)]) == 0

    report = json.loads(capsys.readouterr().out)
    assert report["report"] == str(out)
    assert report["bound_by"] == "gpu"
    assert report["links"]["h2d"]["nbytes"] == 24e9
    assert report["peaks"]["tier.hbm"]["planned"] == 7 << 30
    assert not (run / "report.html").exists()


def test_a_report_needs_neither_torch_nor_a_gpu(tmp_path: Path) -> None:
    run = write_run(on_cpu(), tmp_path / "run")
    code = (
        "import sys; sys.modules['torch'] = None; from penstock.cli import main as cli; "
        f"sys.exit(cli.run(['report', {str(run)!r}]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
    assert "Bottleneck: the CPU" in ran.stdout


def test_the_run_of_a_killed_program_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(offloaded(ended=None, ended_by=None, exit_code=None), tmp_path / "run")
    samples = run / "samples.jsonl"
    samples.write_bytes(samples.read_bytes()[:-40])

    assert main.run(["report", str(run)]) == 0

    output = capsys.readouterr().out
    assert "samples.jsonl: the last line was cut off" in output
    assert "cut off, or is still running" in (run / "report.html").read_text()


@pytest.mark.parametrize("make", [lambda: make_run([], [], []), hostile])
def test_empty_and_hostile_runs_can_be_reported(
    make: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(make(), tmp_path / "run")  # type: ignore[operator]

    assert main.run(["report", str(run)]) == 0
    assert "\x00" not in capsys.readouterr().out


def test_a_missing_run_and_another_version_are_rejected_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["report", str(tmp_path / "none")]) == 1
    none = capsys.readouterr().err
    run = write_run(offloaded(1), tmp_path / "run")
    observation = json.loads((run / "observe.json").read_text())
    (run / "observe.json").write_text(json.dumps({**observation, "version": 7}))
    assert main.run(["report", str(run)]) == 1
    newer = capsys.readouterr().err

    assert none.startswith("error: ")
    assert "not an observed run" in none
    assert "version" in newer
    assert "7" in newer
    assert "Traceback" not in none + newer
    assert not (run / "report.html").exists()


def test_an_unwritable_path_suggests_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(on_cpu(), tmp_path / "run")
    (run / "report.html").mkdir()
    assert main.run(["report", str(run)]) == 1
    taken = capsys.readouterr().err
    assert main.run(["report", str(run), "-o", str(tmp_path / "no" / "r.html")]) == 1
    missing = capsys.readouterr().err

    for output in (taken, missing):
        assert "cannot be written" in output
        assert "--out" in output
    assert not list(run.glob(".*"))  # no temporary file is left


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write anywhere")
def test_a_read_only_run_can_be_reported_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(on_cpu(), tmp_path / "run")
    run.chmod(0o500)
    try:
        assert main.run(["report", str(run)]) == 1
        assert "cannot be written (Permission denied)" in capsys.readouterr().err
        assert main.run(["report", str(run), "-o", str(tmp_path / "r.html")]) == 0
    finally:
        run.chmod(0o700)


def test_a_comparison_has_a_table_sentences_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write_run(offloaded(), tmp_path / "a")
    b = write_run(streamed(), tmp_path / "b")
    out = tmp_path / "compare.html"

    assert main.run(["compare", str(a), str(b), "-o", str(out)]) == 0
    output = capsys.readouterr().out
    assert main.run(["compare", str(a), str(b), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)

    assert "B is 1.33 times as fast as A" in output
    assert out.read_text().count("<figure") >= 8
    step = next(row for row in report["rows"] if row["name"] == "step time")
    assert step["ratio"] == pytest.approx(0.75)
    assert report["words"][0].startswith("B is 1.33 times")


def test_a_comparison_without_a_run_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write_run(on_cpu(), tmp_path / "a")

    assert main.run(["compare", str(a), str(tmp_path / "b")]) == 1
    assert str(tmp_path / "b") in capsys.readouterr().err
