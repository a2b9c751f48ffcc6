"""The choice of an I/O engine, and the reason given for it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from penstock import _native
from penstock.machine.sysfs import System
from penstock.storage.engines import choose_engine, explain_refusal
from penstock.storage.errors import EngineError

DISABLED = "proc/sys/kernel/io_uring_disabled"
STATUS = "proc/self/status"


def test_threads_are_chosen_where_io_uring_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "io_uring_errno", lambda: errno.EPERM)

    choice = choose_engine()

    assert choice.name == "threads"
    assert choice.reason.startswith("no io_uring: ")
    with pytest.raises(EngineError, match=r"engine 'io_uring': .* use engine='threads'"):
        choose_engine("io_uring")


@pytest.mark.parametrize(
    ("code", "files", "expected"),
    [
        (errno.ENOSYS, {}, "the kernel does not support it (boot Linux 5.6"),
        (errno.EPERM, {DISABLED: "2"}, "kernel.io_uring_disabled=2 (`sudo sysctl"),
        (errno.EPERM, {DISABLED: "0", STATUS: "Seccomp:\t2\n"}, "a seccomp filter refuses it"),
        (errno.EPERM, {STATUS: "Seccomp:\t0\n"}, "refused: Operation not permitted (look for"),
        (errno.ENOMEM, {DISABLED: "0"}, "ulimit -l"),
        (errno.EMFILE, {}, "Too many open files"),
    ],
)
def test_a_refusal_is_explained(
    tmp_path: Path, code: int, files: dict[str, str], expected: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert expected in str(explain_refusal(code, System(tmp_path)))
