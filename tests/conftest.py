"""What the suites share."""

from __future__ import annotations

import pytest

from penstock.memory.placement import Place
from penstock.system import System
from tests.places import places_here


@pytest.fixture(params=places_here(), ids=repr)
def place(request: pytest.FixtureRequest) -> Place:
    place: Place = request.param
    return place


def pytest_report_header() -> str:
    nodes = System().allowed_nodes()
    return f"penstock: memory nodes {', '.join(map(str, nodes))}"
