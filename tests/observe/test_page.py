"""The report page: complete, small, safe and accessible."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from penstock.observe import page as page_module
from penstock.observe.compare import compare
from penstock.observe.compare_page import compare_page
from penstock.observe.measures import measure
from penstock.observe.page import page
from penstock.observe.plots import PHASE_COLOURS, PhaseIndex
from penstock.observe.records import Event, GpuSample, Phase, RecordedRun, Sample
from penstock.observe.timeline import MAX_BOXES
from tests.observe.synthetic_runs import hostile, make_run, offloaded, on_cpu, sampled, streamed

CSS = Path(page_module.__file__).with_name("page.css").read_text()


class Reader(HTMLParser):
    """Collects elements as a browser would see them."""

    VOID = ("meta", "br", "img", "input", "link")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def all(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        return [
            attrs
            for name, attrs in self.found
            if name == tag and all(attrs.get(key) == value for key, value in wanted.items())
        ]


RUNS: dict[str, Callable[[], RecordedRun]] = {
    "offloaded": offloaded,
    "streamed": streamed,
    "sampled": sampled,
    "on_cpu": on_cpu,
    "hostile": hostile,
    "nothing": lambda: make_run([], [], []),
}


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {name: page(measure(make())) for name, make in RUNS.items()}


@pytest.mark.parametrize("name", RUNS)
def test_elements_are_closed_and_plots_have_a_description_and_a_table(
    name: str, pages: dict[str, str]
) -> None:
    reader = Reader(pages[name])

    assert reader.open == []
    plots = [a for a in reader.all("svg") if a.get("role") == "img"]
    assert all(attrs["aria-label"] for attrs in plots)
    assert len(plots) == len(reader.all("figure")) == len(reader.all("details"))
    assert len(plots) >= {"nothing": 0, "on_cpu": 2}.get(name, 4)


@pytest.mark.parametrize("name", RUNS)
def test_the_page_fetches_nothing_and_allows_only_its_own_script(
    name: str, pages: dict[str, str]
) -> None:
    reader = Reader(pages[name])
    (policy,) = (a["content"] or "" for a in reader.all("meta") if "http-equiv" in a)
    script = re.search(r"<script>(.*?)</script>", pages[name], re.DOTALL)

    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy
    assert [attrs for attrs in reader.all("script") if attrs] == [
        {"type": "application/json", "id": "data"}
    ]
    assert not {tag for tag, _ in reader.found} & {"img", "link", "iframe", "object", "form"}
    for _, attrs in reader.found:
        assert not [key for key in attrs if key.startswith("on") or key in ("src", "href")]


def test_hostile_names_are_escaped(pages: dict[str, str]) -> None:
    html = pages["hostile"]

    assert html.count("<script") == 2
    assert "<img" not in html
    assert "&lt;/script&gt;" in html
    html.encode("utf-8")  # fails on a lone surrogate
    data = re.search(r'id="data">(.*?)</script>', html, re.DOTALL)
    assert data is not None
    assert "<" not in data[1]
    assert any("</script>" in name for name in json.loads(data[1])["phases"])


def test_sections_are_in_order(pages: dict[str, str]) -> None:
    titles = re.findall(r"<h2>(.*?)</h2>", pages["streamed"])

    assert titles == [
        "What to do", "Also noticed", "Memory, step 1", "Traffic, step 1", "Overlap", "Timeline",
        "Peaks", "Whole run", "About this run",
    ]  # fmt: skip
    assert "Bottleneck: GPU compute" in pages["streamed"]
    assert "planned for backward 7.00 GiB" in pages["streamed"]
    assert "ceiling 25.0 GB/s" in pages["streamed"]


def test_missing_data_is_listed(pages: dict[str, str]) -> None:
    assert "no samples: memory over time is not shown" in pages["nothing"]
    assert "no steps: figures per step are not shown" in pages["nothing"]
    assert "no events: overlap, waits and the timeline are not shown" in pages["sampled"]
    assert "the machine has no GPU" in pages["on_cpu"]


def test_several_processes_are_listed() -> None:
    run = offloaded()
    both = replace(run, ranks={"rank-0": run, "rank-1": streamed()})

    assert "rank-1" in page(measure(both))


def long_run() -> RecordedRun:
    """Return a run with many samples, and a step of thirty thousand kernels."""
    phases = [Phase("forward", n, n * 10.0, n * 10.0 + 10.0) for n in range(120)]
    samples = [
        Sample(t=k * 0.1, gpu=(GpuSample(k % 977, 2000, 3000, 0.5, 1.0, 1.0),))
        for k in range(12_000)
    ]
    samples[7_000] = replace(samples[7_000], gpu=(GpuSample(123_456, 2000, 3000),))
    events = [
        Event("gpu", "kernel", f"kernel {k % 50}", 100 + k * 3e-4, 100 + k * 3e-4 + 1e-4, 10)
        for k in range(30_000)
    ]
    return make_run(phases, events, samples, interval=0.1)


def test_the_page_of_a_long_run_is_small_and_shows_its_extremes() -> None:
    html = page(measure(long_run()))

    assert len(html) < 3_000_000
    assert html.count('class="box') <= MAX_BOXES
    assert "30,000 events are drawn as" in html
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])  # type: ignore[index]
    (whole,) = (plot for name, plot in data["plots"].items() if name == "run-gpu0")
    assert max(whole["lines"][0]["y"]) == 123_456


def test_two_runs_side_by_side_share_a_scale() -> None:
    both = measure(offloaded()), measure(streamed())
    html = compare_page(("a<b", "b"), both, compare(*both))
    reader = Reader(html)

    assert reader.open == []
    assert "a&lt;b" in html
    tops = {a["id"]: a["data-top"] for a in reader.all("figure")}
    assert tops["a-memory-0"] == tops["b-memory-0"]


# Colours.


def test_phases_have_the_same_colours_on_every_page() -> None:
    first, second = PhaseIndex(["forward", "backward", "rollout"]), PhaseIndex(["update", "data"])
    mixed = PhaseIndex(["score", "update", "rollout", "backward"])

    assert [first.colour(name) for name in ("forward", "backward")] == [0, 1]
    assert second.colour("update") == mixed.colour("update") == 2
    assert first.colour("backward") == mixed.colour("backward")
    assert len({mixed.colour(name) for name in mixed.names}) == 4
    html = page(measure(offloaded()))
    assert re.search(r'<button[^>]*class="toggle s2"[^>]*>update<', html)
    assert f".s{max(PHASE_COLOURS.values())} {{" in CSS


def palette(scheme: str) -> dict[str, tuple[float, ...]]:
    light, dark = CSS.split("@media (prefers-color-scheme: dark)")[:2]
    written = light if scheme == "light" else dark
    found = re.findall(r"--(\w+): #([0-9a-f]{6})", written)
    assert len(dict(found)) >= 14
    return {
        name: tuple(int(text[i : i + 2], 16) / 255 for i in (0, 2, 4))
        for name, text in dict(found).items()
    }


def linear(colour: tuple[float, ...]) -> list[float]:
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]


def luminance(colour: tuple[float, ...]) -> float:
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def contrast(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_contrast_with_the_background(scheme: str) -> None:
    colours = palette(scheme)

    for ground in ("ground", "raised"):
        for name in ("text", "quiet", "bad", "c1"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
        for name in (f"c{k}" for k in range(8)):
            assert contrast(colours[name], colours[ground]) >= 3.0, (name, ground)
            assert contrast(colours[name], colours["on"]) >= 4.5, (name, "on")


# Full loss of one kind of cone (Machado, Oliveira and Fernandes, 2009), in linear RGB.
SIGHT = {
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
               (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
               (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
               (0.004733, 0.691367, 0.303900)),
    "all": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
}  # fmt: skip


def lab(rgb: list[float]) -> tuple[float, ...]:
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(w * max(0.0, c) for w, c in zip(row, rgb, strict=True)) for row in rows]
    x, y, z = (
        v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116
        for v in (xyz[0] / 0.9505, xyz[1], xyz[2] / 1.089)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_in_one_plot_are_distinguishable(scheme: str, sight: str) -> None:
    colours = palette(scheme)
    seen = {}
    for name in ("c0", "c1", "c2", "c3"):
        rgb = linear(colours[name])
        seen[name] = lab(
            [sum(w * c for w, c in zip(row, rgb, strict=True)) for row in SIGHT[sight]]
        )
    for left, right in itertools.combinations(seen, 2):
        apart = sum((a - b) ** 2 for a, b in zip(seen[left], seen[right], strict=True)) ** 0.5
        assert apart >= 12, (left, right, apart)
