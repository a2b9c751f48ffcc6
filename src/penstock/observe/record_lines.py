"""Records as lines of JSON and back. Room: show.

A line is one record; a key that is missing was not known. Keys that this version does not know are
left out: `observe.json` has the version that refuses what cannot be read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from penstock.observe.records import Event, GpuSample, HostSample, Phase, Sample

Line = Sample | Phase | Event

T = TypeVar("T")

_DIGITS = 9
"""Nanoseconds: what the clocks have."""


def line_of(record: Line) -> str:
    """One line, with its end."""
    return _write(_known(record)) + "\n"


_write = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode

_NAMES = {
    kind: tuple(field.name for field in dataclasses.fields(kind))
    for kind in (Sample, Phase, Event, GpuSample, HostSample)
}


def _known(record: Any) -> dict[str, Any]:
    """What is not known is left out, at every level."""
    found: dict[str, Any] = {}
    for name in _NAMES[type(record)]:
        value = getattr(record, name)
        if isinstance(value, float):
            found[name] = round(value, _DIGITS)
        elif isinstance(value, HostSample):
            if host := _known(value):
                found[name] = host
        elif isinstance(value, tuple) and value and isinstance(value[0], GpuSample):
            found[name] = [_known(item) for item in value]
        elif value is not None and value != () and value != {}:
            found[name] = value
    return found


def parse_line(kind: type[T], text: str) -> T | None:
    """The record, or None where the line is none: cut off, or of something else."""
    try:
        data = json.loads(text, parse_constant=_refuse)
        made = _READERS[kind](data)
    except (ValueError, TypeError, AttributeError, KeyError):
        return None
    assert isinstance(made, kind)
    return made


def _sample(data: dict[str, Any]) -> Sample:
    host = data.get("host", {})
    return Sample(
        t=float(data["t"]),
        step=_whole(data.get("step")),
        phase=_text(data.get("phase")),
        gpu=tuple(_gpu(item) for item in data.get("gpu", ())),
        host=HostSample(
            rss=_whole(host.get("rss")),
            available=_whole(host.get("available")),
            pinned=_whole(host.get("pinned")),
            nodes={str(node): int(used) for node, used in host.get("nodes", {}).items()},
        ),
        disk={str(k): (int(read), int(written)) for k, (read, written) in _items(data, "disk")},
        cpu=tuple(float(share) for share in data.get("cpu", ())),
        tiers={str(tier): int(held) for tier, held in _items(data, "tiers")},
    )


def _gpu(data: dict[str, Any]) -> GpuSample:
    return GpuSample(
        allocated=_whole(data.get("allocated")),
        reserved=_whole(data.get("reserved")),
        used=_whole(data.get("used")),
        utilisation=_number(data.get("utilisation")),
        h2d=_number(data.get("h2d")),
        d2h=_number(data.get("d2h")),
        peak=_whole(data.get("peak")),
    )


def _phase(data: dict[str, Any]) -> Phase:
    start, end = float(data["start"]), float(data["end"])
    return Phase(str(data["name"]), _whole(data.get("step")), start, end)


def _event(data: dict[str, Any]) -> Event:
    pinned = data.get("pinned")
    return Event(
        track=str(data["track"]),
        kind=str(data["kind"]),
        name=str(data["name"]),
        start=float(data["start"]),
        end=float(data["end"]),
        step=_whole(data.get("step")),
        phase=_text(data.get("phase")),
        link=_text(data.get("link")),
        nbytes=_whole(data.get("nbytes")),
        source=_text(data.get("source")),
        target=_text(data.get("target")),
        pinned=None if pinned is None else bool(pinned),
        where=_text(data.get("where")),
    )


def _refuse(literal: str) -> None:
    raise ValueError(f"{literal} is no number that JSON has")


def _items(data: dict[str, Any], key: str) -> Any:
    return data.get(key, {}).items()


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


_READERS: Mapping[type, Callable[[dict[str, Any]], object]] = {
    Sample: _sample,
    Phase: _phase,
    Event: _event,
}
