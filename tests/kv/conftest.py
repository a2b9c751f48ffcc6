"""Run the same tests over three spaces: host memory, a stand-in CUDA driver, and a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from penstock.kv.address_space import CudaSpace, HostSpace, Space
from tests.kv.fake_cuda_driver import PAGE, DriverSpace

SPACES: dict[str, Callable[[], Space]] = {
    "host": lambda: HostSpace(PAGE),
    "driver": DriverSpace,
    "cuda": lambda: CudaSpace(torch.device("cuda")),
}


@pytest.fixture(params=["host", "driver", pytest.param("cuda", marks=pytest.mark.gpu)])
def space(request: pytest.FixtureRequest) -> Iterator[Space]:
    opened = SPACES[request.param]()
    yield opened
    opened.close()
