"""Scratch directories that several runs and several users share.

Tests that need a second user run their code in a child process. With root it changes its user id;
without, the store is closed to its owner with chmod instead, and a line says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from penstock.cli.store import remove_stores
from penstock.storage import leftovers
from penstock.storage.leftovers import clear_leftovers, find_stores, remove_store
from penstock.storage.store import Store
from penstock.units import KiB

REPO = Path(__file__).parents[2]
OTHER_USER, ANOTHER_USER = 61001, 61002
SIZE = 64 * KiB

STARTER = """
import sys
from penstock.storage.leftovers import clear_leftovers, find_stores
from penstock.storage.store import Store

print("ready", flush=True)
sys.stdin.readline()
notes = clear_leftovers([sys.argv[1]])
with Store.create(sys.argv[1], 65536, engine="threads") as store:
    left = [found.data_path for found in find_stores([sys.argv[1]]) if found.state == "left"]
    print(repr((notes, left)), flush=True)
    sys.stdin.readline()
    store.volumes[0].read_block(0, 4096)
print("done", flush=True)
"""


USER = """
import contextlib, io, json, os, sys
from penstock.cli import main
from penstock.storage.leftovers import clear_leftovers, find_stores

uid, directory, write, expression = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
with contextlib.redirect_stdout(io.StringIO()):
    main.run(["store", "ls", directory])  # imports what the other user may not be able to read
os.chdir(directory)  # relative paths: only this user may enter the parent directories
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
os.write(write, json.dumps(eval(expression)).encode())
"""

SEE_AND_CLEAR = """[
    (found := find_stores(["."])[0], clear_leftovers(["."]))[1],
    found.state, found.user, found.nbytes, found.reason,
]"""

LIST_AND_REMOVE = """[
    [main.run(["store", "ls", "."]), main.run(["store", "rm", "."])], sorted(os.listdir(".")),
]"""


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A directory in which every user may create, and remove what is their own."""
    path = tmp_path / "scratch"
    path.mkdir()
    path.chmod(0o1777)
    return path


def leave_stores(path: Path, count: int = 1) -> list[Path]:
    """Leave stores as a killed run does; return their directories."""
    code = (
        "import os, sys\n"
        "from penstock.storage.store import Store\n"
        "for _ in range(int(sys.argv[2])):\n"
        "    store = Store.create(sys.argv[1], 65536, engine='threads')\n"
        "    store._finalizer.detach()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    before = set(path.iterdir())
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, path, str(count)], check=False)
    left = sorted(set(path.iterdir()) - before)
    assert len(left) == count
    return left


def give_to(uid: int, store: Path) -> None:
    """Make a store another user's."""
    if os.geteuid() == 0:
        os.chown(store / "data", uid, -1)
        os.chown(store, uid, -1)
    else:
        print("not root: the other user's store is simulated with chmod 0")
        store.chmod(0)


def run_as(uid: int, directory: Path, expression: str) -> object:
    """Return what an expression gives in a child process in `directory`, as JSON has it."""
    read, write = os.pipe()
    command = [sys.executable, "-c", USER, str(uid), str(directory), str(write), expression]
    child = subprocess.run(command, cwd=REPO, pass_fds=[write], check=False)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        result = answer.read()
    assert child.returncode == 0
    return json.loads(result)


def test_twenty_runs_that_start_together_clear_the_same_leftovers(scratch: Path) -> None:
    leave_stores(scratch, 12)
    with Store.create(scratch, SIZE, engine="threads") as live:
        starters = [
            subprocess.Popen(
                [sys.executable, "-c", STARTER, scratch], cwd=REPO, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for _ in range(20)
        ]  # fmt: skip
        for starter in starters:
            assert starter.stdout is not None
            assert starter.stdout.readline() == "ready\n"
        for starter in starters:
            assert starter.stdin is not None
            starter.stdin.write("go\n")
            starter.stdin.flush()
        started = [starter.stdout.readline() for starter in starters if starter.stdout]
        ended = [starter.communicate("end\n") for starter in starters]

        assert started == [repr(((), [])) + "\n"] * 20
        assert ended == [("done\n", "")] * 20
        assert [found.data_path for found in find_stores([scratch])] == [live.volumes[0].data_path]
    assert list(scratch.iterdir()) == []


def test_a_store_of_another_user_is_noted_and_not_touched(scratch: Path) -> None:
    (store,) = leave_stores(scratch)
    give_to(OTHER_USER, store)

    cleared = run_as(ANOTHER_USER, scratch, SEE_AND_CLEAR)

    assert isinstance(cleared, list)
    notes, *listed = cleared
    if os.geteuid() == 0:
        assert listed == ["unreadable", f"uid {OTHER_USER}", None, "Permission denied"]
        assert notes == [
            f".: 1 store of other users (uid {OTHER_USER}) not touched; "
            f"`penstock store ls .` lists them"
        ]
    else:
        assert listed[0] == "unreadable"
        store.chmod(0o700)
    assert (store / "data").exists()


def test_another_users_store_does_not_hide_or_keep_the_others(
    scratch: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    theirs, mine = leave_stores(scratch, 2)
    give_to(OTHER_USER, theirs)
    if os.geteuid() == 0:
        give_to(ANOTHER_USER, mine)

    result = run_as(ANOTHER_USER, scratch, LIST_AND_REMOVE)

    assert result == [[0, 0], [theirs.name]]
    printed = capfd.readouterr().out
    assert "unreadable" in printed
    assert "Permission denied" in printed
    theirs.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read another user's store")
def test_a_run_of_root_leaves_the_stores_of_users_to_them(scratch: Path) -> None:
    theirs, mine = leave_stores(scratch, 2)
    give_to(OTHER_USER, theirs)

    (note,) = clear_leftovers([scratch])

    assert f"1 store of other users (uid {OTHER_USER}, 1.06 MiB) not touched" in note
    assert (theirs.exists(), mine.exists()) == (True, False)
    assert [removed.kept_because for removed in remove_stores([scratch])] == [""]
    assert not theirs.exists()


def test_a_directory_that_may_not_be_listed_does_not_stop_a_run(scratch: Path) -> None:
    leave_stores(scratch)
    scratch.chmod(0o1733)  # as for a drop box
    if os.geteuid() != 0:
        scratch.chmod(0o300)

    notes = run_as(OTHER_USER, scratch, 'clear_leftovers(["."])')

    scratch.chmod(0o700)
    assert notes == [".: not searched for stores of killed runs: Permission denied"]


def test_a_store_that_cannot_be_removed_is_a_note(scratch: Path) -> None:
    (store,) = leave_stores(scratch)
    if os.geteuid() == 0:
        give_to(OTHER_USER, store)
    store.chmod(0o500)

    notes = run_as(OTHER_USER, scratch, 'clear_leftovers(["."])')

    data = f"{store.name}/data"
    assert notes == [f"{data}: left by a killed run, not removed: Permission denied"]
    store.chmod(0o700)


def test_a_store_below_a_read_only_directory_is_emptied(scratch: Path) -> None:
    (store,) = leave_stores(scratch)
    if os.geteuid() == 0:
        give_to(OTHER_USER, store)
    scratch.chmod(0o555)

    notes = run_as(OTHER_USER, scratch, 'clear_leftovers(["."])')

    scratch.chmod(0o755)
    assert notes == []
    assert list(store.iterdir()) == []


def test_links_are_never_followed(scratch: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (kept,) = leave_stores(elsewhere)
    (scratch / kept.name).symlink_to(kept)
    inner = scratch / f"penstock-{uuid4().hex}"
    inner.mkdir()
    (inner / "data").symlink_to(kept / "data")

    assert find_stores([scratch]) == []
    assert clear_leftovers([scratch]) == ()
    assert remove_stores([scratch]) == []

    assert (kept / "data").exists()
    assert (scratch / kept.name).is_symlink()
    # A scratch directory that is itself a link is common, and works.
    (tmp_path / "link").symlink_to(elsewhere)
    assert clear_leftovers([tmp_path / "link"]) == ()
    assert not kept.exists()


def test_a_store_that_was_replaced_after_it_was_listed_stays(scratch: Path, tmp_path: Path) -> None:
    first, second, third = leave_stores(scratch, 3)
    found = {Path(store.data_path).parent: store for store in find_stores([scratch])}
    outside = tmp_path / "moved"
    first.rename(outside)
    first.symlink_to(outside)
    (second / "data").rename(tmp_path / "data")
    (second / "data").symlink_to(tmp_path / "data")
    (third / "data").unlink()

    assert remove_store(found[first]) == 0
    with pytest.raises(OSError, match="symbolic links"):
        remove_store(found[second])
    assert remove_store(found[third]) == 0

    assert (outside / "data").exists()
    assert (tmp_path / "data").exists()


def test_directories_with_similar_names_are_not_stores(scratch: Path) -> None:
    for name in ("penstock-results", "penstock-", f"penstock-{'0' * 31}", f"xpenstock-{'0' * 32}"):
        (scratch / name).mkdir()
        (scratch / name / "data").write_text("years of work")

    assert find_stores([scratch]) == []
    assert remove_stores([scratch], force=True) == []
    assert len(list(scratch.glob("*/data"))) == 4


def test_a_lock_that_another_process_holds_for_a_moment_is_waited_for(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel keeps a killed run's lock until its io_uring is gone; `store ls` takes it too."""
    (store,) = leave_stores(scratch)
    holder = subprocess.Popen(
        ["flock", store / "data", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    while find_stores([scratch])[0].state != "in use":
        pass
    sleeps = iter([None] * 3)

    def sleep(_: float) -> None:
        if next(sleeps, "release") == "release" and holder.stdin:
            holder.communicate()

    monkeypatch.setattr(leftovers.time, "sleep", sleep)
    assert clear_leftovers([scratch]) == ()
    assert not store.exists()
