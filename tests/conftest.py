"""What the suites share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from penstock.machine.sysfs import System
from penstock.memory.placement import Place
from tests.support.cpu_time import CpuTime
from tests.support.long_lived import LongLived
from tests.support.memory_places import places_here


@pytest.fixture(params=places_here(), ids=repr)
def place(request: pytest.FixtureRequest) -> Place:
    place: Place = request.param
    return place


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuTime())
    config.pluginmanager.register(LongLived())
    # A shell starts what it puts into the background with Ctrl-C ignored, and tests press it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    nodes = System().allowed_nodes()
    return f"penstock: memory nodes {', '.join(map(str, nodes))}"


START_FIRST = (
    "tests/train/test_several_ranks.py",
    *("tests/equivalence/test_plans.py", "tests/equivalence/test_optimizers.py"),
    *("tests/equivalence/test_adapters.py", "tests/conformance/test_placement.py"),
    *("tests/cli/test_plan.py", "tests/fuzz/test_commands.py", "tests/train/test_plan_agrees.py"),
    *("tests/generate/test_compiled_layers.py", "tests/campaign/test_campaign.py"),
    *("tests/engine/test_trace_memory.py", "tests/equivalence/test_against_torch.py"),
)
"""The files that take longest. They start first, so that no process of `make test` is left alone
with one of them at the end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    root = config.rootpath
    order = {root / name: at for at, name in enumerate(START_FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(autouse=True, scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Neither what the user's own probe found nor the suites' probes reach the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums inside torch's kernels then run in one order, here and in a plain loop."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
