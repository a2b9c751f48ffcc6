"""Show where the GPU's compute stream is idle in a step, and why.

    python bench/bench_engine.py --shape 3b --batch 4 --hbm 24GiB --trace step.json.gz
    python bench/launch_gaps.py step.json.gz

A gap between two kernels of the stream has one of two reasons. Either the second kernel was
launched only after the first one had ended: the thread that launches kernels was late. Or it was
launched in time, and the stream waited for another one: for a copy, or for a sweep that the copy
follows. Also prints the kernels that take longest, and what other streams did.
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
SHORT = 10.0
"""Microseconds: shorter gaps are counted together."""


@dataclass(frozen=True, slots=True)
class Span:
    """What a stream, or a call of the driver, did from `start` to `end`, in microseconds."""

    name: str
    start: float
    end: float
    correlation: int
    """Number that a call and the work it launched have in common."""


def read_trace(path: Path) -> tuple[dict[int, list[Span]], dict[int, Span]]:
    """Return the work of each stream in order, and the calls that launched it by correlation."""
    stored = path.read_bytes()
    text = gzip.decompress(stored) if path.suffix == ".gz" else stored
    events = json.loads(text)["traceEvents"]
    streams: dict[int, list[Span]] = defaultdict(list)
    calls: dict[int, Span] = {}
    for event in events:
        if event.get("cat") in ON_DEVICE:
            streams[event["args"]["stream"]].append(_span(event))
        elif event.get("cat") in CALLS:
            made = _span(event)
            calls[made.correlation] = made
    for spans in streams.values():
        spans.sort(key=lambda each: each.start)
    return dict(streams), calls


def _span(event: dict[str, Any]) -> Span:
    start = float(event["ts"])
    correlation = int(event["args"].get("correlation", -1))
    return Span(event["name"], start, start + float(event["dur"]), correlation)


def compute_stream(streams: dict[int, list[Span]]) -> int:
    """Return the stream with the most kernels."""
    return max(streams, key=lambda stream: len(streams[stream]))


def gaps(spans: list[Span], calls: dict[int, Span]) -> list[tuple[str, float, Span, Span]]:
    """Return each gap: its reason, its microseconds, and the work before and after it."""
    found: list[tuple[str, float, Span, Span]] = []
    last = spans[0]
    for span in spans[1:]:
        idle = span.start - last.end
        if idle > 0:
            call = calls.get(span.correlation)
            late = call is not None and call.end > last.end
            reason = "short" if idle < SHORT else "launched late" if late else "waited"
            found.append((reason, idle, last, span))
        if span.end > last.end:
            last = span
    return found


def report(path: Path, longest: int) -> None:
    streams, calls = read_trace(path)
    main = compute_stream(streams)
    spans = streams[main]
    whole = max(each.end for each in spans) - spans[0].start
    found = gaps(spans, calls)
    idle = sum(each[1] for each in found)
    print(f"{path.name}: {whole / 1e3:.1f} ms, {len(spans)} kernels, {idle / 1e3:.1f} ms idle")
    for reason in ("short", "launched late", "waited"):
        some = [each[1] for each in found if each[0] == reason]
        print(f"  {reason}: {sum(some) / 1e3:.1f} ms in {len(some)} gaps")
    _print_launches(spans, calls)
    print("longest gaps (start in ms, length in ms, before, after)")
    for reason, length, before, after in sorted(found, key=lambda each: -each[1])[:longest]:
        at = (before.end - spans[0].start) / 1e3
        names = f"{before.name[:50]} | {after.name[:50]}"
        print(f"  {at:9.2f} {length / 1e3:7.3f} {reason}: {names}")
    _print_kernels(spans, longest)
    for stream, others in sorted(streams.items()):
        if stream != main:
            busy = sum(each.end - each.start for each in others) / 1e3
            kinds = Counter(each.name[:40] for each in others).most_common(2)
            print(f"stream {stream}: {busy:.1f} ms in {len(others)}: {kinds}")


def _print_launches(spans: list[Span], calls: dict[int, Span]) -> None:
    """Print how far launches are ahead of the GPU: a thread that is late is never far ahead."""
    ahead = sorted(
        span.start - calls[span.correlation].start for span in spans if span.correlation in calls
    )
    if ahead:
        parts = ", ".join(f"{p} %: {ahead[len(ahead) * p // 100] / 1e3:.2f}" for p in (5, 25, 50))
        print(f"  launched ahead of the GPU by, in ms: {parts}")
        near = bisect.bisect(ahead, 200.0)
        print(f"  {near} of {len(ahead)} kernels were launched less than 0.2 ms ahead")


def _print_kernels(spans: list[Span], longest: int) -> None:
    seconds: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for span in spans:
        seconds[span.name] += span.end - span.start
        number[span.name] += 1
    print("kernels by time (ms, launches)")
    for name, micro in seconds.most_common(longest):
        print(f"  {micro / 1e3:9.2f} {number[name]:6d} {name[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--longest", type=int, default=20, help="gaps and kernels to list")
    args = parser.parse_args()
    for path in args.traces:
        report(path, args.longest)


if __name__ == "__main__":
    main()
