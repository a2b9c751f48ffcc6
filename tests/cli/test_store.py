"""`penstock store` and `penstock bench storage` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.units import MiB
from tests.support.disks import loop_device


def test_stores_of_killed_runs_are_listed_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"""if True:
        import os
        from penstock.storage.store import Store
        store = Store.create({str(tmp_path)!r}, 1 << 20, engine='threads')
        os.kill(os.getpid(), 9)
    """
    subprocess.run([sys.executable, "-c", code], check=False)

    assert main.run(["store", "ls", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == 1

    assert main.run(["store", "rm", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["kept_because"] == ""
    assert main.run(["store", "ls", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_disk_is_measured_with_each_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "storage", str(tmp_path), "--size", "64MiB", "--passes", "1", "--json"]

    assert main.run(command) == 0

    rates = json.loads(capsys.readouterr().out)
    assert {rate["pattern"] for rate in rates} == {"read", "write", "mixed"}
    assert "threads" in {rate["engine"] for rate in rates}


def test_a_raw_device_is_measured_only_if_it_may_be_erased(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with loop_device(tmp_path, 40 * MiB) as device:
        before = Path(device).read_bytes()
        command = ["bench", "storage", device, "--size", "32MiB", "--passes", "1", "--json"]

        assert main.run(command) == 1
        printed = capsys.readouterr()
        assert printed.err.startswith(f"{device}: loop device over ")
        assert "40.0 MiB, holds nothing with a known signature" in printed.err
        assert "--erase-device" in printed.err
        assert Path(device).read_bytes() == before

        assert main.run([*command, "--erase-device"]) == 0
        printed = capsys.readouterr()
        assert printed.err.startswith(f"{device}: loop device over ")
        assert {rate["pattern"] for rate in json.loads(printed.out)} == {"read", "write", "mixed"}
