"""Killed runs, racing runs, and store files that something else has changed."""

from __future__ import annotations

import dataclasses
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.cli.store import remove_stores
from penstock.storage.errors import PathError, StoreInUseError, TruncatedStoreError
from penstock.storage.header import parse_header
from penstock.storage.leftovers import find_stores, remove_store
from penstock.storage.store import Store
from penstock.storage.volume import open_volume
from penstock.units import KiB, MiB
from tests.support.disks import Buffers, direct_directory, loop_device

UNIT = 64 * KiB
REPO = Path(__file__).parents[2]

WRITER = """
import sys
from penstock.storage.store import Store
from penstock.units import MiB
from tests.support.disks import Buffers

store = Store.create(sys.argv[1], 32 * MiB)
extent = store.allocate(16 * MiB, name="moments")
lane = Buffers().random(16 * MiB)
print(store.volumes[0].data_path, flush=True)
while True:
    store.start_write(extent, lane).wait()
"""

RACER = """
import sys
from penstock.storage.errors import StorageError
from penstock.storage.store import Store
from penstock.units import MiB

print("ready", flush=True)
sys.stdin.readline()
try:
    store = Store.create(sys.argv[1], 4 * MiB)
    print("won", store.volumes[0].data_path, flush=True)
except StorageError as lost:
    print("lost", type(lost).__name__, flush=True)
sys.stdin.readline()
"""


def start(code: str, path: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPO,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill_in_mid_write(path: str | Path) -> str:
    """Kill a run while it writes, and return the path of its data file."""
    with start(WRITER, path) as writer:
        try:
            data = line(writer)
            (alive,) = find_stores([path])
            assert alive.state == "in use"
            assert alive.header is not None
            assert alive.header.pid == writer.pid
            with pytest.raises(StoreInUseError):
                remove_store(alive)
            with pytest.raises(StoreInUseError):
                open_volume(data)
        finally:
            writer.send_signal(signal.SIGKILL)
    # The kernel tears down a dead process's io_uring asynchronously; the lock is held until then.
    while find_stores([path])[0].state == "in use":
        time.sleep(0.01)
    return data


def test_the_store_of_a_killed_run_is_found_and_removed(tmp_path: Path) -> None:
    direct_directory(tmp_path)
    data = kill_in_mid_write(tmp_path)

    (left,) = find_stores([tmp_path])
    assert (left.data_path, left.state, left.removable) == (data, "left", True)
    assert left.nbytes >= 32 * MiB
    (removed,) = remove_stores([tmp_path])
    assert (removed.freed_nbytes, removed.kept_because) == (left.nbytes, "")
    assert os.listdir(tmp_path) == []


def test_a_new_run_leaves_the_store_of_a_killed_run_alone(tmp_path: Path) -> None:
    direct_directory(tmp_path)
    data = kill_in_mid_write(tmp_path)
    before = Path(data).read_bytes()[: 2 * MiB]

    with Store.create(tmp_path, 1 * MiB):
        assert sorted(s.state for s in find_stores([tmp_path])) == ["in use", "left"]

    assert Path(data).read_bytes()[: 2 * MiB] == before


def test_the_store_of_a_killed_run_on_a_raw_device_is_removed(tmp_path: Path) -> None:
    with loop_device(tmp_path, 40 * MiB) as device:
        kill_in_mid_write(device)
        (left,) = find_stores([device])
        assert (left.state, left.is_device) == ("left", True)
        assert [r.kept_because for r in remove_stores([device])] == [""]
        assert find_stores([device]) == []
        with Store.create(device):
            pass


def race(path: str | Path) -> list[list[str]]:
    racers = [start(RACER, path) for _ in range(2)]
    try:
        assert [line(racer) for racer in racers] == ["ready", "ready"]
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        return [line(racer).split() for racer in racers]
    finally:
        for racer in racers:
            racer.communicate("end\n")


def test_two_processes_on_one_directory_never_share_a_file(tmp_path: Path) -> None:
    direct_directory(tmp_path)
    outcomes = race(tmp_path)

    assert [outcome[0] for outcome in outcomes] == ["won", "won"]
    assert outcomes[0][1] != outcomes[1][1]
    assert os.listdir(tmp_path) == []


def test_only_one_of_two_processes_gets_a_device(tmp_path: Path) -> None:
    with loop_device(tmp_path, 8 * MiB) as device:
        outcomes = race(device)

    assert sorted(outcome[0] for outcome in outcomes) == ["lost", "won"]


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The data file of a store that is on disk without a living owner."""
    direct_directory(tmp_path)
    store = Store.create(tmp_path, 4 * MiB)
    extent = store.allocate(4 * UNIT, name="left")
    store.start_write(extent, Buffers().random(4 * UNIT)).wait()
    # End as a killed process would: descriptors are closed, files stay.
    store._finalizer.detach()
    assert store._native.close(10.0) == []
    for volume in store.volumes:
        volume.close()
    return Path(store.volumes[0].data_path)


@pytest.mark.parametrize("length", [0, 100, 4096, 1 * MiB, 5 * MiB - 4096, 5 * MiB - 1])
def test_a_truncated_store_is_still_found(left: Path, length: int) -> None:
    os.truncate(left, length)

    assert [s.data_path for s in find_stores([left.parents[1]])] == [str(left)]


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_a_file_truncated_during_a_run_raises_an_error_that_names_it(
    tmp_path: Path, engine: str
) -> None:
    direct_directory(tmp_path)
    buffers = Buffers()
    with Store.create(tmp_path, 4 * MiB, engine=engine) as store:  # type: ignore[arg-type]
        extent = store.allocate(4 * UNIT, name="moments")
        lane = buffers.random(4 * UNIT)
        store.start_write(extent, lane).wait()
        os.truncate(store.volumes[0].data_path, 1 * MiB + UNIT)

        with pytest.raises(TruncatedStoreError, match=r"moments: .* has truncated it"):
            store.start_read(extent, lane).wait()


def rewrite(data: Path, change: dict[int, bytes]) -> None:
    with data.open("r+b") as file:
        for offset, value in change.items():
            file.seek(offset)
            file.write(value)


def test_a_store_of_a_newer_version_is_found_as_newer(left: Path) -> None:
    rewrite(left, {8: struct.pack("<I", 2)})

    assert find_stores([left.parents[1]])[0].state == "newer"


@pytest.mark.parametrize("offset", [0, 9, 20, 50, 80, 110])
def test_a_store_with_a_damaged_header_is_found_as_damaged(left: Path, offset: int) -> None:
    byte = left.read_bytes()[offset]
    rewrite(left, {offset: bytes([byte ^ 0x10])})

    assert find_stores([left.parents[1]])[0].state in ("damaged", "newer")


def test_a_store_of_another_machine_is_removed_only_with_force(left: Path) -> None:
    header = parse_header(left.read_bytes()[:4096])
    rewrite(left, {0: dataclasses.replace(header, host="elsewhere").to_bytes()})
    directory = left.parents[1]

    assert find_stores([directory])[0].state == "elsewhere"
    (refused,) = remove_stores([directory])
    assert "a run on elsewhere" in refused.kept_because
    assert left.exists()
    (removed,) = remove_stores([directory], force=True)
    assert removed.kept_because == ""
    assert not left.exists()


def test_removal_leaves_foreign_files_alone(left: Path) -> None:
    directory = left.parents[1]
    foreign = directory / "penstock-notes"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    (left.parent / "note").write_text("not a store")
    remove_stores([directory])

    assert (foreign / "thesis.tex").read_text() == "years of work"
    assert (left.parent / "note").exists()
    assert not left.exists()


def test_a_failed_create_leaves_nothing_behind(tmp_path: Path) -> None:
    direct_directory(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "file").write_text("not a directory")

    with pytest.raises(PathError, match="neither a directory nor a block device"):
        Store.create([tmp_path / "run", tmp_path / "file"], 1 * MiB)

    assert os.listdir(tmp_path / "run") == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_forked_child_leaves_its_parents_store_alone(tmp_path: Path) -> None:
    direct_directory(tmp_path)
    code = """
import os, sys
from penstock.storage.store import Store
store = Store.create(sys.argv[1], 1 << 20)
child = os.fork()
if child == 0:
    sys.exit(0)
print(os.waitpid(child, 0)[1], os.path.exists(store.volumes[0].data_path))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, tmp_path],
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert done.stdout == "0 True\n"
    assert os.listdir(tmp_path) == []
