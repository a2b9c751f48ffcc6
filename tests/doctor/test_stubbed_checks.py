"""Checks that query more than the kernel's files, with stubs or in a separate process."""

from __future__ import annotations

import errno
import json
import os
import py_compile
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock import _native
from penstock.doctor import devices, limits, memory
from penstock.machine.sysfs import System
from penstock.units import GiB, KiB, MiB
from tests.support.fake_sysfs import fake_root


@pytest.mark.parametrize(
    ("code", "changes", "found", "fix"),
    [
        (0, {}, "works: the kernel allows it, and storage uses it", ""),
        (errno.EPERM, {"proc/sys/kernel/io_uring_disabled": "2"}, "disabled=2", "sudo sysctl"),
        (errno.ENOSYS, {}, "the kernel does not support it", "Linux 5.6"),
        (errno.EPERM, {"proc/self/status": "Seccomp:\t2"}, "seccomp", "--security-opt"),
        (errno.EPERM, {}, "refused: Operation not permitted", "dmesg"),
    ],
)
def test_io_uring_is_tried_and_a_failure_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, changes: dict[str, str],
    found: str, fix: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(_native, "io_uring_errno", lambda: code)
    finding = devices.check_io_uring(fake_root(tmp_path, "healthy", changes=changes))
    assert finding.status == ("warn" if code else "ok")
    assert found in finding.found
    assert fix in finding.fix


def test_binding_that_the_kernel_denies_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def refuse(*args: object) -> None:
        calls.append(args)
        raise PermissionError(errno.EPERM, "mbind: Operation not permitted")

    monkeypatch.setattr(_native, "Region", refuse)
    finding = memory.check_binding(fake_root(tmp_path, "numa"))
    assert (finding.status, len(calls)) == ("bad", 1)
    assert finding.found == "node 0: mbind: Operation not permitted"
    assert "--cap-add SYS_NICE" in finding.fix


def test_missing_vector_instructions_on_x86_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "isa_name", lambda: "baseline")
    monkeypatch.setattr(_native, "isa_names", lambda: ["baseline"])
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="x86_64"))
    assert limits.check_instruction_sets(System()).status == "warn"
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="aarch64"))
    assert limits.check_instruction_sets(System()).status == "ok"


def test_an_old_python_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.sys, "version_info", (3, 10, 4, "final", 0))
    finding = limits.check_python(System())
    assert (finding.status, finding.found) == ("bad", "3.10.4")


def test_a_package_without_byte_code_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "site-packages" / "torch" / "__init__.py"
    source.parent.mkdir(parents=True)
    source.write_text("")
    monkeypatch.setattr(limits, "_origin", {"torch": str(source)}.get)
    finding = limits.check_byte_code(System())
    assert (finding.status, "torch" in finding.found) == ("note", True)
    assert f"compileall -q -j 0 {source.parents[1]}`" in finding.fix
    py_compile.compile(str(source), doraise=True)
    assert limits.check_byte_code(System()).status == "ok"


@pytest.mark.parametrize(("free", "status"), [(9 * GiB, "warn"), (11 * GiB, "ok")])
def test_little_free_space_is_reported(
    monkeypatch: pytest.MonkeyPatch, free: int, status: str
) -> None:
    space = SimpleNamespace(f_bavail=free // (4 * KiB), f_frsize=4 * KiB)
    monkeypatch.setattr(os, "statvfs", lambda _: space)
    finding = devices.check_free_space(System())
    assert finding.status == status
    assert str(Path.cwd()) in finding.found


@pytest.mark.parametrize(("nbytes", "status"), [(64 * MiB, "warn"), (8 * GiB, "ok")])
def test_small_shared_memory_is_reported(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, status: str
) -> None:
    space = SimpleNamespace(f_blocks=nbytes // (4 * KiB), f_frsize=4 * KiB)
    monkeypatch.setattr(os, "statvfs", lambda _: space)
    assert devices.check_shared_memory(System()).status == status


def test_missing_shared_memory_is_reported(tmp_path: Path) -> None:
    finding = devices.check_shared_memory(System(tmp_path))
    assert (finding.status, finding.found) == ("warn", "no /dev/shm")


@pytest.mark.parametrize(
    ("listings", "count", "status"), [((), 0, "note"), (("healthy",), 0, "bad"), ((), 2, "ok")]
)
def test_a_missing_driver_is_bad_only_if_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listings: tuple[str, ...], count: int,
    status: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(_native, "cuda_devices", lambda: count)
    monkeypatch.setattr(_native, "cuda_why_none", lambda: "no CUDA driver")
    assert devices.check_driver(fake_root(tmp_path, *listings)).status == status


def fake_torch(version: str, cuda: str | None, *, available: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=lambda: available),
    )


@pytest.mark.parametrize(
    ("torch", "gpus", "status", "found"),
    [
        (None, 0, "bad", "cannot be imported"),
        (fake_torch("2.5.1", None), 0, "bad", "torch 2.5.1, CPU only"),
        (fake_torch("2.13.0+cpu", None, available=False), 0, "ok", "torch 2.13.0+cpu, CPU only"),
        (fake_torch("2.13.0", None, available=False), 1, "bad", "it does not find the GPU"),
        (fake_torch("2.13.0", "12.8"), 1, "ok", "torch 2.13.0, CUDA 12.8"),
    ],
)
def test_torch_must_be_recent_and_find_the_gpu(
    monkeypatch: pytest.MonkeyPatch, torch: object, gpus: int, status: str, found: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(_native, "cuda_devices", lambda: gpus)
    finding = devices.check_torch(System())
    assert finding.status == status
    assert found in finding.found


@pytest.mark.parametrize(
    ("driver", "cuda", "status"),
    [(12080, "13.0", "bad"), (12020, "12.8", "ok"), (13000, "12.8", "ok"), (12080, None, "ok")],
)
def test_a_driver_older_than_torchs_cuda_is_bad(
    monkeypatch: pytest.MonkeyPatch, driver: int, cuda: str | None, status: str
) -> None:
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetCudaDriverVersion=lambda: driver,
        NVMLError=RuntimeError,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setitem(sys.modules, "torch", fake_torch("2.13.0", cuda))
    assert devices.check_cuda_versions(System()).status == status


def run_doctor(
    directory: Path, prelude: str = "pass", **environment: str
) -> dict[str, dict[str, str]]:
    """Run `prelude` and then the doctor in a separate process, and return its findings."""
    code = f"import os; {prelude}; import sys; from penstock.cli.main import run; "
    run = subprocess.run(
        [sys.executable, "-c", code + "sys.exit(run(['doctor', '--json']))"],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode in (0, 1), run.stderr
    return {finding["check"]: finding for finding in json.loads(run.stdout)}


def test_a_deleted_current_directory_is_reported_and_the_other_checks_run(tmp_path: Path) -> None:
    doomed = tmp_path / "doomed"
    doomed.mkdir()
    found = run_doctor(doomed, "os.rmdir(os.getcwd())")
    assert found["free space"]["status"] == "warn"
    assert "no current directory (No such file or directory)" in found["free space"]["found"]
    assert found["torch"]["status"] == "warn"
    assert "importing torch would end the process" in found["torch"]["found"]
    assert found["python"]["status"] == "ok"


def test_a_missing_temporary_directory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    finding = devices.check_free_space(System())
    assert finding.status == "warn"
    assert "no temporary directory (No usable temporary directory" in finding.found
    assert "TMPDIR" in finding.fix


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None"
"""A process without torch starts sooner. Instruction sets do not depend on it."""


def test_an_unknown_instruction_set_is_bad(tmp_path: Path) -> None:
    finding = run_doctor(tmp_path, WITHOUT_TORCH, PENSTOCK_ISA="sse9")["instruction sets"]
    assert finding["status"] == "bad"
    assert "PENSTOCK_ISA=sse9 names no instruction set; choose baseline, avx2" in finding["found"]
    assert "unset PENSTOCK_ISA" in finding["fix"]


def test_json_has_the_fix_under_its_deprecated_key_too(tmp_path: Path) -> None:
    finding = run_doctor(tmp_path, WITHOUT_TORCH, PENSTOCK_ISA="sse9")["instruction sets"]
    assert finding["mend"] == finding["fix"]


@pytest.mark.parametrize(("requested", "chosen"), [("Baseline", "baseline"), ("", None)])
def test_instruction_set_names_are_case_insensitive(
    tmp_path: Path, requested: str, chosen: str | None
) -> None:
    found = run_doctor(tmp_path, WITHOUT_TORCH, PENSTOCK_ISA=requested)["instruction sets"]["found"]
    assert found.endswith(f"; {chosen or _native.isa_names()[-1]} in use")
