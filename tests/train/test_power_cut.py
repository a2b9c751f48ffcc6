"""What a power cut did to the files of earlier versions does not make a run unresumable."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.run_directory import thin_out
from penstock.errors import SettingsError
from penstock.settings import RUN_FILE, Settings, merge_layers
from penstock.train.saved_settings import read_saved_settings
from tests.support.manifests import update_manifest
from tests.train.runs import RunResult, Runs, run_command
from tests.train.test_session import Whole


@pytest.fixture
def out(whole: Whole, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    shutil.copytree(whole[0], tmp_path / "out")
    return tmp_path / "out"


def settings_of(out: Path) -> Settings:
    return merge_layers(read_saved_settings(out).layers)


def resume(out: Path) -> RunResult:
    return run_command(["train", "--resume", "--json", "--out", str(out)])


def test_a_resume_with_an_empty_run_yaml_takes_the_settings_of_the_checkpoint(
    runs: Runs, out: Path
) -> None:
    (out / RUN_FILE).write_bytes(b"")

    result = resume(out)

    assert result.code == 0, result.errors
    assert f"{out / RUN_FILE} is empty" in result.errors
    assert f"are taken from {out / 'checkpoint-000006' / RUN_FILE}" in result.errors
    assert str(runs.data) in (out / RUN_FILE).read_text()


@pytest.mark.parametrize("content", ["missing", "zeros", "half", "a line too short"])
def test_a_damaged_run_yaml_yields_the_settings_of_the_run(out: Path, content: str) -> None:
    path, expected = out / RUN_FILE, settings_of(out)
    raw = path.read_bytes()
    assert read_saved_settings(out).note == ""
    path.unlink()
    if content != "missing":
        lr = raw.index(b"lr: ")
        cuts = {"zeros": bytes(len(raw)), "half": raw[: raw.rindex(b"\n", 0, len(raw) // 2) + 1]}
        path.write_bytes(cuts.get(content, raw[: lr + len("lr: 0")]))

    assert settings_of(out) == expected
    assert str(path) in read_saved_settings(out).note


def test_settings_in_run_yaml_still_win_over_those_of_the_checkpoint(out: Path) -> None:
    text = (out / RUN_FILE).read_text()
    (out / RUN_FILE).write_text(text.replace("lr: 0.01\n", "lr: 0.03\n", 1))
    assert settings_of(out).schedule.lr == 0.03


def test_a_checkpoint_of_an_earlier_version_yields_what_it_has(out: Path) -> None:
    for path in (out / RUN_FILE, *out.glob(f"checkpoint-*/{RUN_FILE}")):
        path.unlink()
    for manifest in out.glob("checkpoint-*/complete.json"):
        update_manifest(manifest.parent, RUN_FILE)
    saved = read_saved_settings(out)
    assert merge_layers(saved.layers).schedule.lr == 0.01
    assert "is missing" in saved.note


def test_an_empty_run_yaml_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    assert read_saved_settings(tmp_path).note == ""
    (tmp_path / RUN_FILE).write_text("")
    saved = read_saved_settings(tmp_path)
    assert saved.layers == ()
    assert "run.yaml is empty, and there is no checkpoint" in saved.note


def test_a_mistake_in_run_yaml_is_an_error_and_not_replaced_by_the_checkpoint(out: Path) -> None:
    with (out / RUN_FILE).open("a") as file:
        file.write("lr: [1\n")
    with pytest.raises(SettingsError, match="is not YAML"):
        read_saved_settings(out)


def test_code_is_not_trusted_because_a_checkpoint_says_so(out: Path) -> None:
    (out / RUN_FILE).write_text("")
    saved = out / "checkpoint-000006" / RUN_FILE
    saved.write_text(
        saved.read_text().replace("trust_remote_code: false", "trust_remote_code: true ")
    )
    update_manifest(saved.parent, RUN_FILE)
    result = resume(out)
    assert result.code == 1
    assert "trust_remote_code: is not taken from the directory of a run" in result.errors


def test_an_empty_tokenizer_is_replaced_from_the_checkpoint(out: Path) -> None:
    (out / "tokenizer.json").write_bytes(b"")
    assert resume(out).code == 0
    saved = out / "checkpoint-000006/tokenizer.json"
    assert (out / "tokenizer.json").read_bytes() == saved.read_bytes()


def test_resuming_a_finished_run_leaves_no_files_behind(out: Path) -> None:
    (out / ".plan.json.0123abcd.tmp").write_text("")
    (out / "checkpoint-000006/.complete.json.0123abcd.tmp").write_text("")
    for _ in range(2):
        assert resume(out).code == 0
    assert not list(out.rglob(".*"))
    assert os.stat(out / "model.safetensors").st_nlink == 2


def test_a_damaged_small_file_is_named_when_no_other_checkpoint_can_be_resumed(out: Path) -> None:
    thin_out(out, newest=out / "checkpoint-000006", keep=2, keep_resumable=1)
    path = out / "checkpoint-000006/tokenizer_config.json"
    path.write_bytes(path.read_bytes()[:-1])
    result = resume(out)
    assert result.code == 1
    assert "checkpoint-000006: tokenizer_config.json has" in result.errors
    assert "--save-weights-only" not in result.errors


def test_the_files_that_a_resume_needs_are_synced(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    real = os.replace

    def replace(source: str, target: str) -> None:
        if Path(target).parent == tmp_path / "out":
            synced.add(Path(target).name)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    assert runs.run(tmp_path / "out", "--steps", "1").code == 0
    written = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert written - synced == {"metrics.jsonl"}


def test_metrics_are_synced_before_a_checkpoint_is_complete(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run resumed from it lacks the lines of the steps before."""
    last, renamed = "", list[str]()
    calls = {name: getattr(os, name) for name in ("write", "fsync", "rename")}

    def watch(name: str, *args: Any) -> Any:
        nonlocal last
        if name == "rename":
            if Path(args[1]).name.startswith("checkpoint-"):
                renamed.append(last)
        elif os.readlink(f"/proc/self/fd/{args[0]}").endswith("metrics.jsonl"):
            last = name
        return calls[name](*args)

    for name in calls:
        monkeypatch.setattr(os, name, partial(watch, name))
    assert runs.run(tmp_path / "out", "--steps", "2", "--save-every", "1").code == 0
    assert renamed == ["fsync", "fsync"]
