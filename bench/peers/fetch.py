"""Download the other systems and their dependencies into one directory for PYTHONPATH.

    python bench/peers/fetch.py carry/peers --python 3.12

For machines without a network: copy the directory there and `export PYTHONPATH=carry/peers`.
Nothing is installed or compiled here; DeepSpeed and RoundPipe compile their kernels on first use,
which needs g++ and ninja. ZeRO-Infinity needs the header and library of libaio, which come from the
distribution's packages if apt-get is available; run.py points the compiler to them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEELS = (
    "hjson==3.1.0", "py-cpuinfo==9.0.0", "msgpack==1.2.4", "pydantic==2.14.3",
    "pydantic-core==2.50.4", "annotated-types==0.8.0", "typing-inspection==0.4.5",
    "einops==0.8.2", "beartype", "tqdm", "roundpipe==0.1.1", "liger-kernel==0.8.5",
)  # fmt: skip
SOURCE = "deepspeed==0.19.8"
"""Source distribution of DeepSpeed, which has no wheel. It contains the kernels and their
builders."""
DEBS = ("libaio-dev", "libaio1")
LIBAIO = "libaio"
"""Subdirectory for the include/ and lib/ of libaio."""


def pip(*words: str) -> None:
    quiet = ("-q", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "pip", *words, *quiet], check=True)


def fetch_wheels(into: Path, python: str, downloads: Path) -> None:
    pip("download", "--no-deps", "--python-version", python, "--only-binary=:all:",
        "--dest", str(downloads), *WHEELS)  # fmt: skip
    for wheel in sorted(downloads.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
        print(wheel.name)


def fetch_deepspeed(into: Path, downloads: Path) -> None:
    pip("download", "--no-deps", "--no-binary=:all:", "--dest", str(downloads), SOURCE)
    archive = next(downloads.glob("deepspeed-*.tar.gz"))
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
        (top,) = Path(folder).iterdir()
        shutil.copytree(top / "deepspeed", into / "deepspeed", dirs_exist_ok=True)
    print(archive.name)


def fetch_libaio(into: Path, downloads: Path) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        print("apt-get is not available: without libaio the ZeRO-Infinity arms cannot be built")
        return
    subprocess.run(["apt-get", "download", "-q", *DEBS], cwd=downloads, check=True)
    root = downloads / "root"
    for package in sorted(downloads.glob("libaio*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
        print(package.name)
    for kind in ("include", "lib"):
        (into / LIBAIO / kind).mkdir(parents=True, exist_ok=True)
    shutil.copy(next(root.rglob("libaio.h")), into / LIBAIO / "include")
    library = next(root.rglob("libaio.so.1.*"))
    for name in (
        "libaio.so",
        "libaio.so.1",
    ):  # two copies instead of a link, because links may get lost when the directory is copied
        shutil.copy(library, into / LIBAIO / "lib" / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("into", type=Path)
    parser.add_argument("--python", default=f"{sys.version_info[0]}.{sys.version_info[1]}")
    args = parser.parse_args()
    args.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        downloads = Path(folder)
        fetch_wheels(args.into, args.python, downloads)
        fetch_deepspeed(args.into, downloads)
        fetch_libaio(args.into, downloads)
    nbytes = sum(file.stat().st_size for file in args.into.rglob("*") if file.is_file())
    print(f"{args.into}: {nbytes / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
