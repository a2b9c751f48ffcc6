"""What things are called on a page that people read. Room: show."""

from __future__ import annotations

import re

from penstock.observe.measures import Measures
from penstock.observe.usage import GPU, SWEEP
from penstock.units import format_bytes, format_rate, format_seconds

NONE = "-"
"""Where there is no figure."""

LONGEST = 160
"""Characters of a name that a page shows: names come from programs, which may say anything."""

# What breaks lines of text apart, or turns it round: controls, lone surrogates, bidi overrides.
_UNFIT = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)

_MEMORY = {
    "allocated": "tensors",
    "reserved": "torch's allocator",
    "used": "whole card",
    "rss": "process",
    "pinned": "pinned",
    "available": "still available",
}


def tidy(text: str, longest: int = LONGEST) -> str:
    """A name as one short line that every encoding and every reader can bear."""
    text = fit(text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def fit(text: str) -> str:
    """The same at full length."""
    return _UNFIT.sub("\ufffd", text)


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def together(text: str) -> str:
    """A number and its unit on one line."""
    return re.sub(r"(?<=\d) (?=(?:[numkMGT\u00b5]?s|%|[KMGT]i?B|B)\b|%)", "\u00a0", text)


def resource_name(resource: str, measures: Measures) -> str:
    """As it stands in a sentence."""
    if resource == GPU:
        return "GPU compute" if measures.run.observation.hardware.gpus else "compute"
    named = {
        "h2d": "copies to the GPU",
        "d2h": "copies from the GPU",
        SWEEP: "the CPU sweep",
        "cpu": "the CPU",
    }
    if resource in named:
        return named[resource]
    if match := re.fullmatch(r"disk:(.+):(read|write)", resource):
        return (
            f"reads from {tidy(match[1])}" if match[2] == "read" else f"writes to {tidy(match[1])}"
        )
    if match := re.fullmatch(r"node(\d+)", resource):
        return f"memory node {match[1]}"
    return tidy(resource)


def link_title(link: str) -> str:
    """As it stands over a plot or in a table's first column."""
    named = {"h2d": "Host to GPU (h2d)", "d2h": "GPU to host (d2h)"}
    if link in named:
        return named[link]
    if match := re.fullmatch(r"disk:(.+):(read|write)", link):
        return f"Disk {tidy(match[1])}, {'read' if match[2] == 'read' else 'written'}"
    if match := re.fullmatch(r"node(\d+)", link):
        return f"Memory node {match[1]}"
    return _disk(link)


def _disk(link: str) -> str:
    return f"Disk {tidy(link.removeprefix('disk:'))}" if link.startswith("disk:") else tidy(link)


def memory_title(key: str) -> str:
    """A series of memory, with what it is of."""
    if key.startswith("tier."):
        return f"Tier {tidy(key.removeprefix('tier.'))}"
    if key.startswith("node"):
        return f"Node {tidy(key.removeprefix('node'))}, in use"
    owner, _, what = key.partition(".")
    name = f"GPU {owner.removeprefix('gpu')}" if owner.startswith("gpu") else "Host"
    return f"{name}, {_MEMORY.get(what, tidy(what))}"


def list_of(names: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def percent(share: float) -> str:
    """Whole, but never 0 or 100 for what is neither."""
    if 0 < share < 0.005:
        return "<1 %"
    if 0.995 <= share < 1:
        return ">99 %"
    return f"{share:.0%}".replace("%", " %")


def nbytes_text(nbytes: float | None) -> str:
    return NONE if nbytes is None else format_bytes(nbytes)


def moved_text(nbytes: float) -> str:
    """Traffic is decimal, as its rates are: `3.10 GB`."""
    return format_rate(nbytes).removesuffix("/s")


def rate_text(rate: float | None) -> str:
    return NONE if rate is None else format_rate(rate)


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    return format_seconds(float(f"{seconds:.6g}")) if seconds > 0 else "0 s"  # 0.0999... is 0.1
