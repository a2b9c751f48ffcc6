"""Kills and full disks during a save: a complete checkpoint is always there."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from penstock import durable_files
from penstock.checkpoint.errors import (
    CheckpointSpaceError,
    CheckpointWarning,
    CheckpointWriteError,
)
from penstock.checkpoint.run_directory import latest_checkpoint, list_checkpoints, new_checkpoint
from penstock.checkpoint.writer import ShardWriter
from penstock.storage import direct_file
from penstock.units import KiB, MiB
from tests.checkpoint.saves import CALLS, acting_at, check_contents, save
from tests.support import fork_server
from tests.support.safetensors_files import tensor_out


@pytest.fixture
def quick_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory if possible: unlike a power cut, a kill loses nothing there."""
    shared = "/dev/shm"
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="penstock-test-", dir=shared) as folder:
        yield Path(folder)


def test_a_save_killed_at_any_call_leaves_a_checkpoint_to_resume_from(
    quick_disk: Path,
) -> None:
    ran = fork_server.run(["-m", "tests.checkpoint.kill_saves", str(quick_disk)])
    assert ran.returncode == 0, ran.stderr
    kills = int(ran.stdout)
    assert kills > 60


def refuse(code: int, name: str, args: tuple[object, ...]) -> None:
    raise OSError(code, os.strerror(code), args[0] if isinstance(args[0], str) else None)


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, pytest.param(errno.EDQUOT, marks=pytest.mark.long), errno.EIO]
)
def test_a_save_that_fails_at_any_call_is_complete_or_changes_nothing(
    quick_disk: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Operations are repeated after EIO; here, the drive stays broken.
    for module in (durable_files, direct_file):
        monkeypatch.setattr(module, "repeat", lambda operation, _path: operation())
    before, out = quick_disk / "before", quick_disk / "out"
    for step in (1, 2):
        save(before, step)
    kinds = set()
    for number in count(1):
        shutil.copytree(before, out)
        try:
            with acting_at(number, lambda *call: refuse(code, *call)) as calls:
                save(out, 3)  # warnings are errors here
            assert len(calls) < number  # the save ended before that call
            break
        except (CheckpointSpaceError, CheckpointWriteError) as error:
            kinds.add(type(error))
        except CheckpointWarning as warning:
            kinds.add(type(warning))
            assert latest_checkpoint(out).step == 3  # type: ignore[union-attr]
        check_unharmed(out)
        shutil.rmtree(out)
    full = code in (errno.ENOSPC, errno.EDQUOT)
    assert kinds == {CheckpointSpaceError if full else CheckpointWriteError, CheckpointWarning}


def check_unharmed(out: Path) -> None:
    newest = latest_checkpoint(out)
    assert newest is not None
    assert newest.step in (2, 3)
    assert newest.resumable
    for found in list_checkpoints(out).whole:
        check_contents(found)
    if newest.step == 2:
        assert sorted(os.listdir(out)) == ["checkpoint-000001", "checkpoint-000002"]
    save(out, 4)  # training can continue
    assert latest_checkpoint(out).step == 4  # type: ignore[union-attr]


def test_a_full_disk_leaves_nothing_of_the_new_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    real = os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        if written := full_after[0]:
            full_after[0] -= 1
            return real(fd, data[: max(1, len(data) // written)], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    for calls in range(8):
        full_after = [calls]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "pwrite", full)
            with pytest.raises(
                CheckpointSpaceError, match="Earlier checkpoints are complete"
            ) as caught:
                save(tmp_path, 2)
        assert caught.value.saving
        assert caught.value.errno == errno.ENOSPC
        assert os.listdir(tmp_path) == ["checkpoint-000001"]
    check_contents(latest_checkpoint(tmp_path))  # type: ignore[arg-type]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "penstock-test", disk],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip(f"needs a small tmpfs: {made.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_full_file_system_keeps_the_previous_checkpoint(small_disk: Path) -> None:
    def write(step: int, nbytes: int) -> None:
        outs = [
            tensor_out(f"t{i}", torch.full((nbytes // 4,), step, dtype=torch.uint8), 64 * KiB)
            for i in range(4)
        ]
        writer = ShardWriter(outs, max_shard_nbytes=nbytes // 2)
        with new_checkpoint(small_disk, step, nbytes=writer.nbytes) as folder:
            writer.write(folder)

    write(1, MiB)
    with pytest.raises(CheckpointSpaceError, match=r"needed 6\.00 MiB, and .* are free") as caught:
        write(2, 6 * MiB)

    assert caught.value.wanted > 6 * MiB
    assert 2 * MiB < caught.value.free < 3 * MiB  # measured after the parts were removed
    assert os.listdir(small_disk) == ["checkpoint-000001"]
    assert latest_checkpoint(small_disk).step == 1  # type: ignore[union-attr]
    write(3, MiB)
    assert latest_checkpoint(small_disk).step == 3  # type: ignore[union-attr]


def test_files_are_synced_before_the_rename_and_old_ones_removed_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This order decides what a power cut can destroy."""
    out = tmp_path.resolve()
    save(out, 1)
    log: list[tuple[str, str]] = []
    for name in CALLS:
        real = getattr(os, name)

        def call(*args, _name=name, _real=real, **more):  # type: ignore[no-untyped-def]
            at = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else args[0]
            log.append((_name, str(at)))
            return _real(*args, **more)

        monkeypatch.setattr(os, name, call)
    save(out, 2)

    (renamed,) = [i for i, (name, at) in enumerate(log) if name == "rename" and ".tmp-" in at]
    draft = log[renamed][1]
    files = {f"{draft}/{name}" for name in os.listdir(out / "checkpoint-000002")}
    synced = [at for name, at in log[:renamed] if name == "fsync"]
    written = [i for i, (name, at) in enumerate(log) if name == "pwrite" and at.startswith(draft)]
    assert files <= set(synced)
    assert synced[-1] == draft
    for path in {log[i][1] for i in written}:
        last = max(i for i in written if log[i][1] == path)
        assert ("fsync", path) in log[last:renamed]
    assert log[renamed + 1 :][[name for name, _ in log[renamed + 1 :]].index("fsync")][1] == str(
        out
    )
    changes = [i for i, (name, _) in enumerate(log) if name in ("unlink", "replace")]
    old = [i for i in changes if "checkpoint-000001" in log[i][1]]
    assert old
    assert min(old) > log.index(("fsync", str(out)), renamed)
