"""Parse and format sizes, rates and durations."""

from __future__ import annotations

import math
import re

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

_SCALES = {
    "": 1, "b": 1,
    "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
LARGEST_SIZE = 1 << 70
"""More than any file or address. A larger number is a mistake, and floats may not hold it."""

_DIGITS = len(str(LARGEST_SIZE))
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Parse `"64GiB"`, `"1.5 TB"`, `"4096"` or `4096` into a number of bytes.

    GiB is always 2**30 and GB is always 10**9. Raises a ValueError that quotes the text.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text > LARGEST_SIZE:
            shown = f"a number of {text.bit_length()} bits"  # Python may refuse to print it
            raise ValueError(f"{shown} is more than any memory or drive has, 1024 EiB")
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    scale = _SCALES.get(match[2].lower()) if match else None
    if match is None or scale is None:
        raise ValueError(f"{text!r} is not a size; write one such as 64GiB, 500GB or 4096")
    # Compare the number of digits first: Python refuses to convert thousands of them.
    whole = match[1].partition(".")[0].lstrip("0")
    nbytes = 0.0 if len(whole) <= _DIGITS else math.inf
    if not nbytes:
        nbytes = round(float(match[1]) * scale) if "." in match[1] else int(match[1]) * scale
    if nbytes > LARGEST_SIZE:
        shown = match[0] if len(match[0]) <= 40 else f"{match[0][:37]}..."
        raise ValueError(f"{shown!r} is more than any memory or drive has, 1024 EiB")
    return int(nbytes)


def parse_memory(text: str | int) -> int:
    """Parse an amount of memory like `parse_bytes`, but refuse a small number without a unit.

    `5` is meant as 5 GiB, never as 5 bytes. A large number can only be bytes.
    """
    nbytes = parse_bytes(text)
    if isinstance(text, str) and text.strip().isdigit() and 0 < nbytes < MiB:
        raise ValueError(f"{text!r} has no unit; write {text.strip()}GiB, or {text.strip()}B")
    return nbytes


def format_bytes(nbytes: float) -> str:
    """Format a size with three digits and a binary unit: `1.50 GiB`, `512 B`."""
    for unit, scale in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(nbytes) >= scale:
            return f"{_three_digits(nbytes / scale)} {unit}"
    return f"{nbytes:.0f} B"


def format_bytes_up(nbytes: int) -> str:
    """Format a size for the command line, rounded up: `23.5GiB` parses to `nbytes` or more."""
    unit, scale = ("GiB", GiB) if nbytes >= GiB else ("MiB", MiB)
    tenths = -(-nbytes * 10 // scale)
    return f"{tenths // 10}.{tenths % 10}{unit}" if tenths % 10 else f"{tenths // 10}{unit}"


def format_rate(bytes_per_second: float) -> str:
    """Format a rate with a decimal unit, as vendors of drives and links do: `55.3 GB/s`."""
    for unit, scale in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_second >= scale:
            return f"{_three_digits(bytes_per_second / scale)} {unit}"
    return f"{bytes_per_second:.0f} B/s"


def format_seconds(seconds: float) -> str:
    """Format a duration with three digits and a unit: `84.1 ns`, `1.20 ms`, `3.50 s`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns"


def round_up(value: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


def _three_digits(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    whole = len(str(int(abs(value))))
    return f"{value:.{max(0, 3 - whole)}f}"
