"""Fixtures for every kind of storage: files, memory and raw devices, with either engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.storage.engines import EngineName, choose_engine
from penstock.units import MiB
from tests.conformance.store_variants import CAPACITY, StoreVariant
from tests.support.disks import Buffers, direct_directory, loop_device, memory_directory


@pytest.fixture(scope="module", params=["file", "tmpfs", "loop512", "loop4096"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "file":
        yield str(direct_directory(directory))
    elif request.param == "tmpfs":
        with memory_directory("conformance") as memory:
            yield str(memory)
    else:
        sector = int(request.param.removeprefix("loop"))
        with loop_device(directory, CAPACITY + 2 * MiB, sector=sector) as device:
            yield device


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest) -> EngineName:
    name: EngineName = request.param
    if name == "io_uring" and choose_engine().name != "io_uring":
        pytest.skip(choose_engine().reason)
    return name


@pytest.fixture(params=[True, False], ids=["verify", "plain"])
def variant(request: pytest.FixtureRequest, path: str, engine: EngineName) -> StoreVariant:
    return StoreVariant(path, engine, request.param)


@pytest.fixture
def buffers() -> Buffers:
    return Buffers()
