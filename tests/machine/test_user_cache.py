"""The directory of cached files, and the hash of the code that computes them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.machine import user_cache
from penstock.machine.user_cache import cache_directory, load_entry, save_entry
from penstock.plan.working_memory import PartMemory


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", fail)

    entry = cache_directory() / "directory" / "entry.json"

    assert not entry.parents[2].exists()
    assert load_entry(PartMemory, entry) is None


def test_a_file_in_the_way_of_the_directory_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    entry = tmp_path / "file" / "directory" / "entry.json"

    save_entry(PartMemory(name="layer", forward=1, backward=2), entry)

    assert load_entry(PartMemory, entry) is None


def test_the_fingerprint_changes_with_any_file_of_the_code(tmp_path: Path) -> None:
    """In processes of their own, with copies of the files that they import."""
    package = tmp_path / "penstock"
    source = Path(user_cache.__file__).parents[1]
    (package / "machine").mkdir(parents=True)
    for name in (
        "durable_files.py",
        "errors.py",
        "io_retries.py",
        "records.py",
        "units.py",
        "machine/user_cache.py",
    ):
        shutil.copy(source / name, package / name)
    for name in ("__init__.py", "machine/__init__.py"):
        (package / name).write_text("")
    code = "from penstock.machine.user_cache import code_fingerprint; print(code_fingerprint())"

    def fingerprint() -> str:
        run = subprocess.run(
            # Without site packages: an editable install would be found before these copies.
            [sys.executable, "-S", "-c", code],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return run.stdout

    first = fingerprint()
    assert fingerprint() == first
    (package / "machine" / "trace.py").write_text("NBYTES = 2\n")
    added = fingerprint()
    (package / "machine" / "trace.py").write_text("NBYTES = 4\n")

    assert len({first, added, fingerprint()}) == 3
