"""CUDA events are recorded again instead of being destroyed and created at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.engine.device import CudaDevice


class Event:
    """Counts how many there are, instead of asking a driver."""

    made = 0

    def __init__(self, **options: bool) -> None:
        assert options == {"enable_timing": True, "blocking": True}
        Event.made += 1
        self.records = 0

    def record(self, stream: object) -> None:
        self.records += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(Event, "made", 0)
    device = object.__new__(CudaDevice)
    device._events, device.torch_device = [], torch.device("cuda", 0)
    return device


def test_an_event_is_recorded_again_once_nobody_has_its_ticket(device: Any) -> None:
    tickets = [device.record() for _ in range(3)]
    first = tickets[0].event
    other = tickets[0]
    del tickets[0]
    assert device.record().event is not first, "somebody still has the ticket"
    del other

    again = device.record()

    assert again.event is first
    assert first.records == 2


def test_steps_of_the_same_length_need_no_more_events(device: Any) -> None:
    latest: list[Any] = []
    for _ in range(5):
        latest = [device.record() for _ in range(100)]  # the one before lives until then

    assert len(latest) == 100
    assert Event.made == 200
