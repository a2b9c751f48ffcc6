"""Convert records to lines of JSON and back.

Each line is one record. Unknown values are left out, and keys that this version does not know are
ignored: the version in `observe.json` decides whether a run can be read at all.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from penstock.observe.records import Event, GpuSample, HostSample, Phase, Sample

Record = Sample | Phase | Event

T = TypeVar("T")

_DIGITS = 9
"""Digits after the decimal point: nanoseconds, the resolution of the clocks."""

_FIELDS = {
    kind: tuple(field.name for field in dataclasses.fields(kind))
    for kind in (Sample, Phase, Event, GpuSample, HostSample)
}

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


def line_of(record: Record) -> str:
    """Format a record as one line, including the newline."""
    return _encode(_known_fields(record)) + "\n"


def parse_line(kind: type[T], text: str) -> T | None:
    """Parse a record, or return None if the line is cut off or is not a record of this kind."""
    try:
        data = json.loads(text, parse_constant=_reject_constant)
        record = _PARSERS[kind](data)
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError):
        return None
    assert isinstance(record, kind)
    return record


def _known_fields(record: Any) -> dict[str, Any]:
    """Collect the fields whose values are known, at every level."""
    known: dict[str, Any] = {}
    for name in _FIELDS[type(record)]:
        value = getattr(record, name)
        if isinstance(value, float):
            known[name] = round(value, _DIGITS)
        elif isinstance(value, HostSample):
            if host := _known_fields(value):
                known[name] = host
        elif isinstance(value, tuple) and value and isinstance(value[0], GpuSample):
            known[name] = [_known_fields(item) for item in value]
        elif value is not None and value != () and value != {}:
            known[name] = value
    return known


def _parse_sample(data: dict[str, Any]) -> Sample:
    host = data.get("host", {})
    return Sample(
        t=float(data["t"]),
        step=_int(data.get("step")),
        phase=_str(data.get("phase")),
        gpu=tuple(_parse_gpu(item) for item in data.get("gpu", ())),
        host=HostSample(
            rss=_int(host.get("rss")),
            available=_int(host.get("available")),
            pinned=_int(host.get("pinned")),
            nodes={str(node): int(used) for node, used in host.get("nodes", {}).items()},
        ),
        disk={str(k): (int(read), int(written)) for k, (read, written) in _items(data, "disk")},
        cpu=tuple(float(share) for share in data.get("cpu", ())),
        tiers={str(tier): int(nbytes) for tier, nbytes in _items(data, "tiers")},
    )


def _parse_gpu(data: dict[str, Any]) -> GpuSample:
    return GpuSample(
        allocated=_int(data.get("allocated")),
        reserved=_int(data.get("reserved")),
        used=_int(data.get("used")),
        utilisation=_float(data.get("utilisation")),
        h2d=_float(data.get("h2d")),
        d2h=_float(data.get("d2h")),
        peak=_int(data.get("peak")),
    )


def _parse_phase(data: dict[str, Any]) -> Phase:
    start, end = float(data["start"]), float(data["end"])
    return Phase(str(data["name"]), _int(data.get("step")), start, end)


def _parse_event(data: dict[str, Any]) -> Event:
    pinned = data.get("pinned")
    return Event(
        track=str(data["track"]),
        kind=str(data["kind"]),
        name=str(data["name"]),
        start=float(data["start"]),
        end=float(data["end"]),
        step=_int(data.get("step")),
        phase=_str(data.get("phase")),
        link=_str(data.get("link")),
        nbytes=_int(data.get("nbytes")),
        source=_str(data.get("source")),
        target=_str(data.get("target")),
        pinned=None if pinned is None else bool(pinned),
        where=_str(data.get("where")),
    )


def _reject_constant(literal: str) -> None:
    """Refuse NaN and Infinity, which Python's parser accepts although JSON does not have them."""
    raise ValueError(f"{literal} is not a valid JSON number")


def _items(data: dict[str, Any], key: str) -> Any:
    return data.get(key, {}).items()


def _int(value: Any) -> int | None:
    return None if value is None else int(value)


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _str(value: Any) -> str | None:
    return None if value is None else str(value)


_PARSERS: Mapping[type, Callable[[dict[str, Any]], object]] = {
    Sample: _parse_sample,
    Phase: _parse_phase,
    Event: _parse_event,
}
