"""Owners of stores, and the commands that list and remove stores."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from uuid import UUID

import pytest
from rich.console import Console

from penstock.cli import store
from penstock.storage.errors import PathError
from penstock.storage.leftovers import Owner, current_owner, find_stores, is_gone
from penstock.storage.store import Store
from penstock.units import MiB
from tests.support.disks import direct_directory


def test_an_owner_is_identified_by_boot_pid_and_start_time() -> None:
    me = current_owner()

    assert me.pid == os.getpid()
    assert is_gone(me) is False
    assert is_gone(Owner(me.pid, me.started + 1, me.boot, me.host)) is True
    assert is_gone(Owner(me.pid, me.started, UUID(int=5), me.host)) is True
    assert is_gone(Owner(2**22 + 1, 5, me.boot, platform.node())) is True
    assert is_gone(Owner(me.pid, me.started, me.boot, "another")) is None


def render_text(table: object) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table)
    console.file.close()
    return console.export_text()


def test_the_store_commands_show_their_results(tmp_path: Path) -> None:
    direct_directory(tmp_path)
    with Store.create(tmp_path, 1 * MiB):
        found = find_stores([tmp_path])
        assert f"{os.getpid()} on {platform.node()}" in render_text(store.render_stores(found))
        (kept,) = store.remove_stores([tmp_path])
        assert kept.kept_because == "in use"
        assert "kept: in use" in render_text(store.render_removed([kept]))
    assert "no stores" in render_text(store.render_stores(find_stores([tmp_path])))
    (row,) = store.stores_json(found)
    assert row["state"] == "in use"
    assert isinstance(row["header"], dict)
    with pytest.raises(PathError):
        find_stores([tmp_path / "nowhere"])


def test_empty_directories_of_killed_processes_are_removed(tmp_path: Path) -> None:
    def directory(name: str, *, age: float = 3600) -> Path:
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, time.time() - age))
        return tmp_path / name

    hidden, named = directory(f".penstock-{'0' * 32}"), directory(f"penstock-{'1' * 32}")
    directory("penstock-results")
    directory(f".penstock-{'2' * 32}", age=0)  # a store that is being created now
    full = directory(f"penstock-{'3' * 32}")
    (full / "notes").write_text("")
    os.utime(full, (0, 0))
    (tmp_path / f"penstock-{'4' * 32}").symlink_to(tmp_path / "penstock-results")

    store.remove_stores([tmp_path])

    assert not hidden.exists()
    assert not named.exists()
    assert len(os.listdir(tmp_path)) == 4
