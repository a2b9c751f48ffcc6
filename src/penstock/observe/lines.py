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
    return json.dumps(_known(record), separators=(",", ":"), allow_nan=False) + "\n"


def _known(record: Any) -> dict[str, Any]:
    kept = ((f.name, getattr(record, f.name)) for f in dataclasses.fields(record))
    return {name: _plain(value) for name, value in kept if not _empty(value)}


def _empty(value: object) -> bool:
    if isinstance(value, HostSample):
        return value == HostSample()
    return value is None or (isinstance(value, tuple | Mapping) and not value)


def _plain(value: object) -> object:
    if isinstance(value, GpuSample | HostSample):
        return _known(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return round(value, _DIGITS) if isinstance(value, float) else value


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
