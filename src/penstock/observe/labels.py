"""Names of resources, links and memories, and formatted numbers, as the report shows them."""

from __future__ import annotations

import re

from penstock.observe.measures import Measures
from penstock.observe.usage import GPU, SWEEP
from penstock.units import format_bytes, format_rate, format_seconds

NO_VALUE = "-"
"""Shown where there is no figure."""

MAX_LENGTH = 160
"""Characters of a name that the report shows. Names come from programs and can contain anything."""

# Characters that break or reverse lines of text: controls, lone surrogates, bidi overrides.
_UNSAFE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)

_RESOURCES = {
    "h2d": "copies to the GPU",
    "d2h": "copies from the GPU",
    SWEEP: "the CPU optimizer sweep",
    "cpu": "the CPU",
    "ranks": "exchanges between ranks",
}

_MEMORIES = {
    "allocated": "tensors",
    "reserved": "reserved by torch",
    "used": "whole device",
    "rss": "process",
    "pinned": "pinned",
    "available": "available",
}


_TIERS = {"hbm": "HBM", "dram": "DRAM", "cxl": "CXL", "nvme": "NVMe"}


# Text.


def shorten(text: str, longest: int = MAX_LENGTH) -> str:
    """Return a name as one short line without unsafe characters."""
    text = sanitize(text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def sanitize(text: str) -> str:
    """Replace characters that break lines or cannot be encoded."""
    return _UNSAFE.sub("\ufffd", text)


def capitalize(text: str) -> str:
    """Capitalize the first letter, and leave the others as they are."""
    return text[:1].upper() + text[1:]


def join_words(names: list[str]) -> str:
    """Return `a`, `a and b`, or `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def keep_units_together(text: str) -> str:
    """Put a no-break space between each number and its unit."""
    return re.sub(r"(?<=\d) (?=(?:[numkMGT\u00b5]?s|%|[KMGT]i?B|B)\b|%)", "\u00a0", text)


# Names.


def resource_name(resource: str, measures: Measures) -> str:
    """Return a resource's name for use in a sentence."""
    if resource == GPU:
        return "GPU compute" if measures.run.observation.hardware.gpus else "compute"
    if resource in _RESOURCES:
        return _RESOURCES[resource]
    if match := re.fullmatch(r"disk:(.+):(read|write)", resource):
        disk = shorten(match[1])
        return f"reads from {disk}" if match[2] == "read" else f"writes to {disk}"
    if match := re.fullmatch(r"node(\d+)", resource):
        return f"memory node {match[1]}"
    return shorten(resource)


def link_title(link: str) -> str:
    """Return a link's name for the title of a plot or the first column of a table."""
    titles = {"h2d": "Host to GPU (h2d)", "d2h": "GPU to host (d2h)"}
    if link in titles:
        return titles[link]
    if match := re.fullmatch(r"disk:(.+):(read|write)", link):
        return f"Disk {shorten(match[1])}, {'read' if match[2] == 'read' else 'written'}"
    if match := re.fullmatch(r"node(\d+)", link):
        return f"Memory node {match[1]}"
    if link.startswith("disk:"):
        return f"Disk {shorten(link.removeprefix('disk:'))}"
    return shorten(link)


def memory_title(key: str) -> str:
    """Return the name of a memory series: its location and the quantity."""
    if key.startswith("tier."):
        return f"{tier_name(key.removeprefix('tier.'))} tier"
    if key.startswith("node"):
        return f"Node {shorten(key.removeprefix('node'))}, in use"
    owner, _, what = key.partition(".")
    name = f"GPU {owner.removeprefix('gpu')}" if owner.startswith("gpu") else "Host"
    return f"{name}, {_MEMORIES.get(what, shorten(what))}"


def tier_name(tier: str) -> str:
    """Return a tier's name as the documentation writes it."""
    return _TIERS.get(tier, shorten(tier))


# Numbers.


def percent(share: float) -> str:
    """Format a share as whole percent, but never as 0 or 100 if it is neither."""
    if 0 < share < 0.005:
        return "<1 %"
    if 0.995 <= share < 1:
        return ">99 %"
    return f"{share:.0%}".replace("%", " %")


def nbytes_text(nbytes: float | None) -> str:
    """Format the size of memory, in binary units."""
    return NO_VALUE if nbytes is None else format_bytes(nbytes)


def moved_text(nbytes: float) -> str:
    """Format traffic in decimal units, as rates are: `3.10 GB`."""
    return format_rate(nbytes).removesuffix("/s")


def rate_text(rate: float | None) -> str:
    """Format bytes per second, in decimal units."""
    return NO_VALUE if rate is None else format_rate(rate)


def seconds_text(seconds: float | None) -> str:
    """Format a duration."""
    if seconds is None:
        return NO_VALUE
    # Rounded first, so that 0.0999999 becomes 100 ms.
    return format_seconds(float(f"{seconds:.6g}")) if seconds > 0 else "0 s"


def number_text(value: float) -> str:
    """Format a number without a unit, such as a loss."""
    return f"{value:.4g}"
