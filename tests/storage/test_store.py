"""The parts of a store that need no disk, or any: engines, ledger, owners, commands, stripes."""

from __future__ import annotations

import errno
import os
import platform
from pathlib import Path
from uuid import UUID

import pytest
from rich.console import Console

from penstock import _native
from penstock.cli import store
from penstock.machine.sysfs import System
from penstock.storage.benchmark import bench_storage
from penstock.storage.engines import choose_engine, find_refusal
from penstock.storage.errors import (
    EngineError,
    ExtentBusyError,
    LostExtentError,
    PathError,
    StorageError,
    StorageWarning,
)
from penstock.storage.layout import Extent
from penstock.storage.owners import Owner, is_gone, this_process
from penstock.storage.store import Ledger, Store, StoreOptions
from penstock.units import KiB, MiB
from tests.support.disks import Buffers, direct_directory, memory_directory

UNIT = 64 * KiB
DISABLED = "proc/sys/kernel/io_uring_disabled"
STATUS = "proc/self/status"


def test_threads_take_over_where_io_uring_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "io_uring_errno", lambda: errno.EPERM)

    choice = choose_engine()

    assert choice.name == "threads"
    assert choice.reason.startswith("no io_uring: ")
    with pytest.raises(EngineError, match=r"engine 'io_uring': .* use engine='threads'"):
        choose_engine("io_uring")


@pytest.mark.parametrize(
    ("refused", "files", "says"),
    [
        (errno.ENOSYS, {}, "the kernel has none (boot Linux 5.6"),
        (errno.EPERM, {DISABLED: "2"}, "kernel.io_uring_disabled=2 (`sudo sysctl"),
        (errno.EPERM, {DISABLED: "0", STATUS: "Seccomp:\t2\n"}, "a seccomp filter refuses it"),
        (errno.EPERM, {STATUS: "Seccomp:\t0\n"}, "refused: Operation not permitted (look for"),
        (errno.ENOMEM, {DISABLED: "0"}, "ulimit -l"),
        (errno.EMFILE, {}, "Too many open files"),
    ],
)
def test_a_refusal_is_explained(
    tmp_path: Path, refused: int, files: dict[str, str], says: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert says in str(find_refusal(refused, System(tmp_path)))


class FakeTicket:
    def __init__(self, verb: str, extent: Extent, offset: int, length: int) -> None:
        self.verb, self.extent, self.offset, self.length = verb, extent, offset, length
        self.done = False
        self.failed: StorageError | None = None

    def failure(self) -> StorageError | None:
        return self.failed

    def overlaps(self, extent: Extent, offset: int, length: int) -> bool:
        return (
            self.extent is extent
            and self.offset < offset + length
            and offset < self.offset + self.length
        )


EXTENT = Extent("moments", 10 * UNIT, 10 * UNIT, 0)


@pytest.mark.parametrize(
    ("moving", "asked", "allowed"),
    [("read", "read", True), ("read", "write", False), ("write", "read", False),
     ("write", "write", False)],
)  # fmt: skip
def test_only_reads_may_share_bytes(moving: str, asked: str, allowed: bool) -> None:
    ledger = Ledger()
    ledger.add(FakeTicket(moving, EXTENT, 2 * UNIT, 2 * UNIT))  # type: ignore[arg-type]

    ledger.check(asked, EXTENT, 4 * UNIT, UNIT)
    ledger.check(asked, EXTENT, 0, 2 * UNIT)
    if allowed:
        ledger.check(asked, EXTENT, 3 * UNIT, UNIT)
        return
    with pytest.raises(ExtentBusyError, match=f"{asked} of bytes that a {moving}"):
        ledger.check(asked, EXTENT, 3 * UNIT, UNIT)


def test_lost_bytes_are_lost_until_all_of_them_are_written_again() -> None:
    ledger = Ledger()
    ticket = FakeTicket("write", EXTENT, 2 * UNIT, 4 * UNIT)
    ticket.done, ticket.failed = True, StorageError("the disk is gone")
    ledger.add(ticket)  # type: ignore[arg-type]
    ledger.note_finished()

    assert ledger.moving == []
    ledger.check("read", EXTENT, 0, 2 * UNIT)
    with pytest.raises(LostExtentError, match=r"262144 B at 131072 .* \(the disk is gone"):
        ledger.check("read", EXTENT, 0, 3 * UNIT)
    ledger.check("write", EXTENT, 3 * UNIT, UNIT)  # out of the middle
    ledger.check("read", EXTENT, 3 * UNIT, UNIT)
    for offset in (2 * UNIT, 4 * UNIT, 5 * UNIT):
        with pytest.raises(LostExtentError):
            ledger.check("read", EXTENT, offset, UNIT)
    ledger.check("write", EXTENT, 0, 10 * UNIT)
    ledger.check("read", EXTENT, 0, 10 * UNIT)


def test_an_owner_is_known_by_boot_pid_and_start() -> None:
    me = this_process()

    assert me.pid == os.getpid()
    assert is_gone(me) is False
    assert is_gone(Owner(me.pid, me.started + 1, me.boot, me.host)) is True
    assert is_gone(Owner(me.pid, me.started, UUID(int=5), me.host)) is True
    assert is_gone(Owner(2**22 + 1, 5, me.boot, platform.node())) is True
    assert is_gone(Owner(me.pid, me.started, me.boot, "another")) is None


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("weights", [(1, 1), (3, 1, 2)])
def test_a_striped_store_gives_back_what_it_got(
    tmp_path: Path, engine: str, weights: tuple[float, ...]
) -> None:
    direct_directory(tmp_path)
    buffers = Buffers()
    options = StoreOptions(weights=weights, stripe_nbytes=2 * UNIT, request_nbytes=UNIT)
    paths = [tmp_path / str(i) for i in range(len(weights))]
    with Store.create(paths, 16 * MiB, engine=engine, options=options) as store:  # type: ignore[arg-type]
        first = store.allocate(100_000, name="first")
        extent = store.allocate(3 * MiB + 5000, name="second")
        source = buffers.random(extent.stored_nbytes)
        store.start_write(first, buffers.random(first.stored_nbytes)).wait()
        store.start_write(extent, source).wait()
        back = buffers.zeros(extent.stored_nbytes)
        store.start_read(extent, back).wait()
        part = buffers.zeros(5 * UNIT)
        store.start_read(extent, part, offset=3 * UNIT).wait()
        written = [os.stat(v.data_path).st_size for v in store.volumes]

        assert back == source
        assert part == source[3 * UNIT : 8 * UNIT]
        shares = [size - 1 * MiB for size in written]
        assert [s / sum(shares) for s in shares] == pytest.approx(
            [w / sum(weights) for w in weights]
        )


def test_paths_are_measured_when_there_are_several(tmp_path: Path) -> None:
    direct_directory(tmp_path)
    with Store.create([tmp_path / "a", tmp_path / "b"], 8 * MiB) as store:
        names = [os.path.dirname(os.path.dirname(v.data_path)) for v in store.volumes]

        assert names == [str(tmp_path / "a"), str(tmp_path / "b")]


@pytest.mark.parametrize(
    ("paths", "capacity", "says"),
    [([], 1, "at least one path"), (["a", "a"], 1, "the same path twice"),
     (["a"], 0, "holds nothing"), (["a"], None, "a capacity must be given")],
)  # fmt: skip
def test_what_cannot_be_a_store(
    tmp_path: Path, paths: list[str], capacity: int | None, says: str
) -> None:
    with pytest.raises(PathError, match=says):
        Store.create([tmp_path / path for path in paths], capacity)
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_o_direct_is_used_with_a_warning() -> None:
    with memory_directory("warned") as directory:
        with pytest.warns(StorageWarning, match=r"no O_DIRECT, .* page cache"):
            store = Store.create(directory, 1 * MiB)
        assert store.volumes[0].direct is False
        store.close()


def text_of(table: object) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table)
    console.file.close()
    return console.export_text()


def test_the_commands_show_what_they_did(tmp_path: Path) -> None:
    direct_directory(tmp_path)
    with Store.create(tmp_path, 1 * MiB):
        found = store.list_stores([tmp_path])
        assert f"{os.getpid()} on {platform.node()}" in text_of(store.render_stores(found))
        (kept,) = store.remove_stores([tmp_path])
        assert kept.kept_because == "in use"
        assert "kept: in use" in text_of(store.render_removed([kept]))
    assert "no stores" in text_of(store.render_stores(store.list_stores([tmp_path])))
    (row,) = store.stores_json(found)
    assert row["state"] == "in use"
    assert isinstance(row["header"], dict)
    with pytest.raises(PathError):
        store.list_stores([tmp_path / "nowhere"])


def test_the_benchmark_measures_every_pattern_and_shows_progress(tmp_path: Path) -> None:
    direct_directory(tmp_path)
    seen: list[float] = []

    rates = bench_storage(
        tmp_path, nbytes=8 * MiB, request_nbytes=[256 * KiB], passes=2, progress=seen.append
    )

    assert {(r.engine, r.pattern) for r in rates} >= {
        ("threads", "read"), ("threads", "write"), ("threads", "mixed"),
    }  # fmt: skip
    assert all(rate.median > 0 and len(rate.samples) == 2 for rate in rates)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert "mixed" in text_of(store.render_rates(rates))
    assert os.listdir(tmp_path) == []
