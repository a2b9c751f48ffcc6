"""Creating, listing and thinning out the checkpoints of a run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from penstock.checkpoint import run_directory
from penstock.checkpoint.disk import check_room, free_nbytes
from penstock.checkpoint.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointSpaceError,
    CheckpointWarning,
)
from penstock.checkpoint.run_directory import (
    discard,
    latest_checkpoint,
    list_checkpoints,
    new_checkpoint,
    remove_leftovers,
)
from tests.checkpoint.saves import check_contents, save


def steps(out: Path) -> list[tuple[int, bool]]:
    return [(found.step, found.resumable) for found in list_checkpoints(out).whole]


def test_a_checkpoint_gets_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "out"
    with new_checkpoint(out, 123) as folder:
        assert folder.parent == out
        assert folder.name.startswith(f".checkpoint-000123.tmp-{os.getpid()}-")
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
        (folder / "weights").write_text("abc")
        assert latest_checkpoint(out) is None

    found = latest_checkpoint(out)
    assert found is not None
    assert (found.path, found.step) == (out / "checkpoint-000123", 123)
    assert found.files == {"sub/file": 1, "weights": 3}
    assert found.nbytes == 4
    assert os.listdir(out) == ["checkpoint-000123"]


def save_and_raise(out: Path, failure: BaseException) -> None:
    with new_checkpoint(out, 2) as folder:
        (folder / "weights").write_text("abc")
        raise failure


def test_a_failed_save_leaves_nothing_and_raises_the_original_error(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for failure in (KeyError("unrelated"), KeyboardInterrupt()):
        with pytest.raises(type(failure)) as caught:
            save_and_raise(tmp_path, failure)
        assert caught.value is failure
        assert os.listdir(tmp_path) == ["checkpoint-000001"]


def test_a_checkpoint_error_that_is_an_os_error_is_not_translated(tmp_path: Path) -> None:
    class StoreError(CheckpointError, OSError):
        pass

    with pytest.raises(StoreError), new_checkpoint(tmp_path, 1):
        raise StoreError(5, "a store's read")


def test_the_newest_are_kept_and_only_the_newest_has_optimizer_states(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=3)

    assert steps(tmp_path) == [(4, True), (3, False), (2, False)]
    assert len(os.listdir(tmp_path)) == 3
    assert not [n for n in os.listdir(tmp_path / "checkpoint-000003") if n.startswith("optim")]
    save(tmp_path, 5, keep=1)
    assert steps(tmp_path) == [(5, True)]


def test_two_resumable_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=3, keep_resumable=2)

    assert steps(tmp_path) == [(4, True), (3, True), (2, False)]
    for found in list_checkpoints(tmp_path).whole:
        check_contents(found)


def test_a_new_checkpoint_stays_although_a_later_step_exists(tmp_path: Path) -> None:
    save(tmp_path, 6, optimizer=False)
    save(tmp_path, 5, keep=1)

    assert steps(tmp_path) == [(5, True)]


def test_a_checkpoint_without_optimizer_states_leaves_older_ones_theirs(tmp_path: Path) -> None:
    for step, optimizer in ((1, True), (2, True), (3, False)):
        save(tmp_path, step, keep=3, optimizer=optimizer)

    assert steps(tmp_path) == [(3, False), (2, True), (1, False)]


def test_a_step_of_seven_digits_sorts_as_the_newest(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        save(tmp_path, step)

    assert [step for step, _ in steps(tmp_path)] == [1_000_000, 999_999]


def test_saving_a_step_again_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 7)
    with pytest.raises(CheckpointExistsError, match="complete checkpoint of step 7"):
        save(tmp_path, 7)

    assert steps(tmp_path) == [(7, True)]
    assert len(os.listdir(tmp_path)) == 1


def test_a_damaged_checkpoint_of_the_same_step_is_renamed(tmp_path: Path) -> None:
    save(tmp_path, 7)
    os.unlink(tmp_path / "checkpoint-000007" / "config.json")
    with pytest.warns(CheckpointWarning, match="renamed to checkpoint-000007.dam"):
        save(tmp_path, 7)

    assert steps(tmp_path) == [(7, True)]
    aside, whole = sorted(os.listdir(tmp_path), reverse=True)
    assert (aside[:26], whole) == ("checkpoint-000007.damaged-", "checkpoint-000007")
    assert (tmp_path / aside / "complete.json").exists()


def test_foreign_directories_are_neither_listed_nor_removed(tmp_path: Path) -> None:
    for name in ("checkpoint-500", "checkpoint-0000001", "checkpoint-000001x", "runs"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-000001").write_text("a file")
    (tmp_path / "checkpoint-000002").mkdir()  # as another program would leave it
    for step in (3, 4, 5):
        save(tmp_path, step, keep=1)

    assert steps(tmp_path) == [(5, True)]
    assert len(os.listdir(tmp_path)) == 7


def damage_missing(folder: Path) -> None:
    os.unlink(folder / "config.json")


def damage_short(folder: Path) -> None:
    os.truncate(folder / "model-00001-of-00002.safetensors", 10)


def damage_grown(folder: Path) -> None:
    with open(folder / "config.json", "a") as file:
        file.write(" ")


def damage_no_manifest(folder: Path) -> None:
    os.unlink(folder / "complete.json")


def damage_manifest(folder: Path) -> None:
    os.truncate(folder / "complete.json", 10)


def damage_step(folder: Path) -> None:
    text = (folder / "complete.json").read_text()
    (folder / "complete.json").write_text(text.replace('"step": 2', '"step": 9'))


def damage_renamed(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("checkpoint-000001"), folder)


def damage_version(folder: Path) -> None:
    text = (folder / "complete.json").read_text()
    (folder / "complete.json").write_text(text.replace('"version": 2', '"version": 3'))


def damage_old_version(folder: Path) -> None:
    text = (folder / "complete.json").read_text()
    (folder / "complete.json").write_text(text.replace('"version": 2', '"version": 1'))


def damage_escape(folder: Path) -> None:
    listed = {"version": 1, "step": 2, "files": {"../checkpoint-000001/config.json": 2}}
    (folder / "complete.json").write_text(json.dumps(listed))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_missing, "config.json: No such file"),
        (damage_short, "model-00001-of-00002.safetensors has 10 B and was written with"),
        (damage_grown, "config.json has 3 B and was written with 2 B"),
        (damage_no_manifest, "has no complete.json"),
        (damage_manifest, "its complete.json is invalid: .* is not JSON"),
        (damage_step, "does not have the content that was written: its checksum differs"),
        (damage_renamed, "its complete.json belongs to step 1"),
        (damage_version, "version is 3, but this Penstock reads versions up to 2"),
        (damage_old_version, "cannot have a checksum in version 1"),
        (damage_escape, "files must be inside the directory"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_the_reason(
    tmp_path: Path,
    damage,  # type: ignore[no-untyped-def]
    reason: str,
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    damage(tmp_path / "checkpoint-000002")

    assert latest_checkpoint(tmp_path).step == 1  # type: ignore[union-attr]
    (error,) = list_checkpoints(tmp_path).damaged
    assert error.path == str(tmp_path / "checkpoint-000002")
    with pytest.raises(CheckpointError, match=reason):
        raise error


def test_a_directory_that_does_not_exist_has_no_checkpoints(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert remove_leftovers(tmp_path / "nowhere") == ()


def test_keeping_zero_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0"), new_checkpoint(tmp_path, 1, keep=0):
        pass


def test_too_little_free_space_is_found_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "not" / "yet"
    check_room(out, free_nbytes(out) // 2)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.checkpoint.disk.free_nbytes", lambda _: 1000)
        check_room(out, 1000)
        with pytest.raises(CheckpointSpaceError):
            check_room(out, 1001)
    with pytest.raises(CheckpointSpaceError, match=r"need .*, and .* are free") as caught:
        check_room(out, 1 << 60)

    assert caught.value.wanted == 1 << 60
    assert 0 < caught.value.free < 1 << 60
    for advice in ("--keep", "--save-weights-only", "--out", str(out)):
        assert advice in str(caught.value)


def test_a_checkpoint_is_gone_from_its_name_for_good_before_its_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoint-000001"
    folder.mkdir()
    done: list[str] = []
    remove = run_directory.shutil.rmtree

    def synced(path: Path) -> None:
        assert path == tmp_path
        assert not folder.exists()
        done.append("synced")

    def removed(path: Path) -> None:
        done.append("removed")
        remove(path)

    monkeypatch.setattr(run_directory, "sync", synced)
    monkeypatch.setattr(run_directory.shutil, "rmtree", removed)
    discard(folder)

    assert done == ["synced", "removed"]
    assert list(tmp_path.iterdir()) == []
