"""The report page in a real browser: `make test-browser`, if Chromium is installed."""

from __future__ import annotations

import base64
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.observe.compare import compare
from penstock.observe.compare_page import compare_page
from penstock.observe.measures import measure
from penstock.observe.page import page
from penstock.observe.training_curves import TrainingCurves
from penstock.observe.training_page import training_page
from tests.observe.browser import Browser, find_browser
from tests.observe.synthetic_runs import hostile, make_run, offloaded, on_cpu, sampled, streamed

PROGRAM = find_browser()
CURVES = TrainingCurves(
    tuple((float(n), 5.0 / n) for n in range(1, 401)),
    ((0.0, 5.5), (200.0, 0.5)),
    lr=tuple((float(n), 1e-5) for n in range(1, 401)),
    seconds=tuple((float(n), 0.25) for n in range(1, 401)),
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        PROGRAM is None,
        reason="Chromium is not installed; on Debian and Ubuntu: apt install chromium",
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    both = measure(offloaded()), measure(streamed())
    made = {
        "offloaded": page(both[0]),
        "streamed": page(both[1]),
        "sampled": page(measure(sampled())),
        "on_cpu": page(measure(on_cpu())),
        "hostile": page(measure(hostile())),
        "nothing": page(measure(make_run([], [], []))),
        "losses": page(both[0], CURVES),
        "training": training_page(CURVES, "out"),
        "compared": compare_page(("a", "b"), both, compare(*both)),
    }
    for name, html in made.items():
        (folder / f"{name}.html").write_text(html, encoding="utf-8")
    kept = Path(__file__).parents[2] / "bench/results/observe/deepspeed-zero3/report.html"
    return {**{name: folder / f"{name}.html" for name in made}, "zero3": kept}


def pixels(png: bytes) -> tuple[int, int, list[bytes]]:
    """Decode an 8-bit PNG without interlacing to width, height and rows of RGB."""
    at, packed, wide, tall, channels = 8, b"", 0, 0, 3
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        body = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            wide, tall, depth, colour = struct.unpack(">IIBB", body[:10])
            assert depth == 8
            channels = {2: 3, 6: 4}[colour]
        elif kind == b"IDAT":
            packed += body
        at += 12 + length
    raw, stride = zlib.decompress(packed), wide * channels
    rows, above = [], bytes(stride)
    for y in range(tall):
        start = y * (stride + 1)
        above = unfiltered(
            raw[start], bytearray(raw[start + 1 : start + 1 + stride]), above, channels
        )
        rows.append(above)
    if channels == 4:
        rows = [bytes(b for i, b in enumerate(row) if i % 4 != 3) for row in rows]
    return wide, tall, rows


def unfiltered(kind: int, row: bytearray, above: bytes, step: int) -> bytes:
    for i in range(len(row)):
        left = row[i - step] if i >= step else 0
        up, corner = above[i], above[i - step] if i >= step else 0
        if kind == 1:
            row[i] = (row[i] + left) & 255
        elif kind == 2:
            row[i] = (row[i] + up) & 255
        elif kind == 3:
            row[i] = (row[i] + (left + up) // 2) & 255
        elif kind == 4:
            guess = left + up - corner
            near = min((abs(guess - v), at, v) for at, v in enumerate((left, up, corner)))
            row[i] = (row[i] + near[2]) & 255
    return bytes(row)


def colours_in(browser: Browser, selector: str) -> Counter[tuple[int, ...]]:
    """Count the pixels of an element on the screen by colour."""
    box = browser.run(
        f"(() => {{const e = document.querySelector({selector!r}); e.scrollIntoView();"
        "const b = e.getBoundingClientRect();"
        "return {x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height}})()"
    )
    answer = browser.call("Page.captureScreenshot", format="png", captureBeyondViewport=True,
                          clip={**box, "scale": 1})  # fmt: skip
    _, _, rows = pixels(base64.b64decode(answer["data"]))
    return Counter(tuple(row[i : i + 3]) for row in rows for i in range(0, len(row), 3))


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(
    "name",
    [
        "offloaded",
        "streamed",
        "sampled",
        "on_cpu",
        "hostile",
        "nothing",
        "losses",
        "training",
        "compared",
        "zero3",
    ],
)
def test_a_page_opens_offline_without_console_messages(
    name: str, width: int, dark: bool, browser: Browser, pages: dict[str, Path]
) -> None:
    browser.messages.clear()
    browser.call("Network.emulateNetworkConditions", offline=True, latency=0,
                 downloadThroughput=0, uploadThroughput=0)  # fmt: skip
    browser.open(pages[name], width=width, dark=dark)

    assert browser.run("document.documentElement.dataset.ready") == "true"
    assert browser.messages == []
    assert browser.run("document.title") != "owned"
    assert browser.run("document.querySelectorAll('h1').length") == 1
    # Nothing sticks out to the right: wide tables scroll within themselves.
    assert browser.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("dark", [False, True])
def test_lines_boxes_and_shades_are_visible(
    dark: bool, browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["offloaded"], dark=dark)
    blue = (90, 169, 240) if dark else (11, 92, 173)

    drawn = colours_in(browser, "#memory-0 .area svg")
    assert drawn[blue] > 100  # the line of tensors
    assert len([n for n in drawn.values() if n > 2000]) >= 3  # three phases, three shades
    boxes = colours_in(browser, "#timeline .area svg")
    common = {colour for colour, count in boxes.items() if count > 500}
    assert len(common) >= 5  # four tracks and the lanes behind them


def test_plots_are_drawn_without_the_script(browser: Browser, pages: dict[str, Path]) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(pages["offloaded"])
        assert browser.run("document.documentElement.dataset.ready") is None
        assert colours_in(browser, "#memory-0 .area svg")[(11, 92, 173)] > 100
        assert browser.run("[...document.querySelectorAll('.tools')].every(t => t.hidden)")
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def view(browser: Browser, figure: str = "timeline") -> tuple[float, float]:
    shown = browser.run(f"document.getElementById('{figure}').dataset.view || '0 1000'")
    low, high = map(float, shown.split())
    return low, high


def area(browser: Browser, figure: str = "timeline") -> dict[str, Any]:
    box: dict[str, Any] = browser.run(
        f"(() => {{const a = document.querySelector('#{figure} .area'); "
        "a.scrollIntoView({block: 'center'}); const b = a.getBoundingClientRect();"
        "return {x: b.x, y: b.y, width: b.width, height: b.height}})()"
    )
    return box


def drag(browser: Browser, box: dict[str, Any], start: float, end: float) -> None:
    y = box["y"] + box["height"] / 2
    places = [box["x"] + share * box["width"] for share in (start, (start + end) / 2, end)]
    browser.mouse("mousePressed", places[0], y, button="left", clickCount=1)
    for x in places[1:]:
        browser.mouse("mouseMoved", x, y, button="left", buttons=1)
    browser.mouse("mouseReleased", places[2], y, button="left", clickCount=1)


def test_buttons_keys_wheel_and_drag_zoom(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["offloaded"])
    press = "document.querySelector('button[data-do={}]').click()"
    assert view(browser) == (0, 1000)

    browser.run(press.format("in"))
    assert view(browser) == (250, 750)
    assert view(browser, "memory-0") == (250, 750)  # the same step: plots move together
    box = browser.run("document.querySelector('#timeline .area svg').getAttribute('viewBox')")
    assert box.split()[:3] == ["250", "0", "500"]
    labels = browser.run(
        "[...document.querySelectorAll('#timeline .x span')].map(s => s.innerText)"
    )
    assert (labels[0], labels[-1]) == ("500 ms", "1.50 s")

    browser.run("document.querySelector('#timeline .area').focus()")
    browser.key("ArrowRight")
    assert view(browser) == (375, 875)
    browser.key("-")
    assert view(browser)[1] - view(browser)[0] == 1000
    browser.key("+")
    browser.key("0")
    assert view(browser) == (0, 1000)

    place = area(browser)
    middle = (place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    browser.mouse("mouseWheel", *middle, deltaX=0, deltaY=-100)
    assert view(browser) == pytest.approx((100, 900), abs=3)
    browser.key("0")

    drag(browser, area(browser), 0.25, 0.5)
    assert view(browser) == pytest.approx((250, 500), abs=3)
    browser.run(press.format("all"))
    assert view(browser) == (0, 1000)


def test_the_wheel_scrolls_the_page_until_a_plot_is_clicked(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["offloaded"])
    place = area(browser)
    browser.mouse("mouseWheel", place["x"] + 50, place["y"] + 40, deltaX=0, deltaY=-100)

    assert view(browser) == (0, 1000)


def test_a_phase_can_be_hidden_and_shown_again(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["offloaded"])
    seen = (
        "[...document.querySelectorAll('#timeline .box')]"
        ".filter(b => getComputedStyle(b).display !== 'none').length"
    )
    shades = seen.replace("#timeline .box", "#memory-0 .shade")
    toggle = "document.querySelector('button[data-phase=\"1\"]')"
    before = browser.run(seen)

    browser.run(f"{toggle}.click()")
    assert browser.run(f"{toggle}.getAttribute('aria-pressed')") == "false"
    assert browser.run(seen) == before - 5  # four kernels and the gradients
    assert browser.run(shades) == 2

    browser.run(f"{toggle}.click()")
    assert browser.run(f"{toggle}.getAttribute('aria-pressed')") == "true"
    assert (browser.run(seen), browser.run(shades)) == (before, 3)


def test_another_step_can_be_selected(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["streamed"])
    chosen = browser.run(
        "(() => {const s = document.getElementById('step'); s.selectedIndex = 1;"
        "s.dispatchEvent(new Event('change')); return s.selectedOptions[0].text})()"
    )

    assert chosen == "step 0 (first)"
    assert browser.run("document.getElementById('timeline').dataset.step") == "0"
    assert browser.run("document.querySelectorAll('#timeline .box').length") == 12 * 8


def test_the_cursor_shows_values_and_boxes(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["offloaded"])
    place = area(browser, "memory-0")
    browser.mouse("mouseMoved", place["x"] + 0.9 * place["width"], place["y"] + 60)
    readout = browser.run("document.querySelector('#memory-0 .readout').innerText")
    assert readout.startswith("at 1.80 s · tensors 2.00 GiB")

    place = area(browser)
    browser.mouse("mouseMoved", place["x"] + 0.95 * place["width"], place["y"] + 18 + 24 + 10)
    readout = browser.run("document.querySelector('#timeline .readout').innerText")
    assert readout.endswith("h2d · weights · 200 ms · 3.00 GB, 15.0 GB/s · update")


def test_a_loss_is_shown_by_step_and_zooms(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["training"])
    place = area(browser, "loss")
    browser.mouse("mouseMoved", place["x"] + 0.5 * place["width"], place["y"] + 60)
    readout = browser.run("document.querySelector('#loss .readout').innerText")
    assert readout == "step 200 \u00b7 training 0.025 \u00b7 evaluation 0.5"

    drag(browser, area(browser, "loss"), 0.25, 0.5)
    assert view(browser, "loss") == pytest.approx((250, 500), abs=3)
    labels = browser.run("[...document.querySelectorAll('#loss .x span')].map(s => s.innerText)")
    assert (labels[0], labels[-1]) == ("100", "200")


def test_every_control_is_reachable_by_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["offloaded"])
    reached = browser.run(
        "[...document.querySelectorAll('button, select, .area, summary, .scroll')]"
        ".every(e => e.tabIndex >= 0)"
    )
    named = browser.run(
        "[...document.querySelectorAll('button')].every(b => b.innerText || b.ariaLabel)"
    )
    assert reached
    assert named
