"""Tensors of any size are written and read in little memory."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoint.reader import ShardReader
from penstock.checkpoint.writer import ShardWriter
from penstock.storage.devices import filesystem_of
from penstock.units import GiB, MiB
from tests.support.safetensors_files import tensor_out

PROGRAM = """
import json, re, sys
import torch
from penstock.checkpoint.reader import ShardReader
from penstock.checkpoint.writer import ShardWriter, TensorOut

folder, part = sys.argv[1], torch.full((4 << 20,), 7, dtype=torch.uint8)

def rss(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) << 10

def write(nbytes, stem):
    parts = lambda: (part for _ in range(nbytes // len(part)))
    out = TensorOut(name="t", dtype=torch.bfloat16, shape=(nbytes // 2,), parts=parts)
    ShardWriter([out], stem=stem).write(folder)

def read(stem):
    into = part.view(torch.bfloat16)
    with ShardReader(folder, stem) as reader:
        for start in range(0, reader.spec("t").shape[0], len(into)):
            reader.read_into("t", into, start)

def growth(action, *args):
    open("/proc/self/clear_refs", "w").write("5")  # reset the peak
    before = rss("VmRSS")
    action(*args)
    return rss("VmHWM") - before

write(8 << 20, "small")
read("small")  # load everything that is loaded on first use
print(json.dumps([growth(write, 1 << 30, "large"), growth(read, "large")]))
"""


def test_one_gib_is_written_and_read_in_less_than_32_mib(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False
    )
    try:
        assert (tmp_path / "large.safetensors").stat().st_size > GiB
    finally:
        (tmp_path / "large.safetensors").unlink(missing_ok=True)
    assert ran.returncode == 0, ran.stderr
    written, read = json.loads(ran.stdout)
    assert written < 32 * MiB
    assert read < 32 * MiB


def cached(path: Path) -> int:
    """Return how many bytes of a file are in the page cache."""
    nbytes = path.stat().st_size
    pages = -(-nbytes // mmap.PAGESIZE)
    seen = (ctypes.c_ubyte * pages)()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        first = ctypes.c_char.from_buffer(view)
        address, length = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(nbytes)
        assert ctypes.CDLL(None, use_errno=True).mincore(address, length, seen) == 0
        del first
    return sum(page & 1 for page in seen) * mmap.PAGESIZE


def test_neither_writing_nor_reading_fills_the_page_cache(tmp_path: Path) -> None:
    if filesystem_of(tmp_path) in ("tmpfs", "ramfs", "overlay"):
        pytest.skip(f"needs a disk behind {tmp_path}")
    path = tmp_path / "model.safetensors"
    ShardWriter([tensor_out("t", torch.zeros(64 * MiB, dtype=torch.uint8))]).write(tmp_path)
    assert cached(path) < 4 * MiB
    with open(path, "rb") as file:
        while file.read(MiB):
            pass
        assert cached(path) > 60 * MiB  # the measurement works
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    with ShardReader(tmp_path) as reader:
        reader.read_into("t", torch.empty(64 * MiB, dtype=torch.uint8))
        for start in range(0, 64 * MiB, MiB // 4):  # parts too small for O_DIRECT
            reader.read_into("t", torch.empty(MiB // 4, dtype=torch.uint8), start)
    assert cached(path) < 4 * MiB
    os.unlink(path)


def test_bytes_in_the_page_cache_are_read_from_there_and_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if filesystem_of(tmp_path) in ("tmpfs", "ramfs", "overlay"):
        pytest.skip(f"needs a disk behind {tmp_path}")
    path = tmp_path / "model.safetensors"
    values = torch.arange(64 * MiB // 4, dtype=torch.int32)
    ShardWriter([tensor_out("t", values)]).write(tmp_path)
    from_disk: list[int] = []
    preadv = os.preadv

    def counted(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        got = preadv(fd, buffers, offset, flags)
        from_disk.append(0 if flags else got)
        return got

    monkeypatch.setattr(os, "preadv", counted)
    for is_cached in (False, True):
        with open(path, "rb") as file:
            while is_cached and file.read(MiB):
                pass
        with ShardReader(tmp_path) as reader:
            from_disk.clear()
            out = torch.empty_like(values)
            reader.read_into("t", out)
        assert torch.equal(out, values)
        assert (sum(from_disk) < MiB) == is_cached
    assert cached(path) > 60 * MiB
    os.unlink(path)
