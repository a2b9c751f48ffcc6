"""The recorded runs behind docs/observe-study.md: files, figures and pages agree."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.observe_study import markdown, study
from penstock.observe.measures import Measures, measure
from penstock.observe.page import page, verdict
from penstock.observe.run_files import read_run

REPO = Path(__file__).parents[2]
KEPT = REPO / "bench/results/observe"
RUNS = ("plain", "deepspeed-zero3", "fsdp2", "penstock")
FIGURES = REPO / "bench/results/observe_study_nvidia-h200_2026-11-18.json"

pytestmark = pytest.mark.skipif(
    not KEPT.parent.exists(), reason="source distributions do not contain the results"
)


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FIGURES.read_text())["results"]["runs"]
    return found


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest) -> tuple[str, Measures]:
    return request.param, measure(read_run(KEPT / request.param))


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{at}.{key}")
    else:
        yield at, -1 if value is None else value  # no figure is negative


def test_a_kept_run_reproduces_the_results_file(
    run: tuple[str, Measures], figures: dict[str, Any]
) -> None:
    name, m = run

    assert dict(leaves(study(m))) == pytest.approx(dict(leaves(figures[name])), rel=1e-9)


def test_a_kept_report_has_the_current_verdict(run: tuple[str, Measures]) -> None:
    """If this fails, render the kept reports again with `penstock report`."""
    name, m = run
    kept = (KEPT / name / "report.html").read_text(encoding="utf-8")

    title = f"<title>{verdict(m)}</title>"
    assert title in page(m)
    assert title in kept


def test_the_kept_penstock_run_moved_the_bytes_of_its_schedule() -> None:
    m = measure(read_run(KEPT / "penstock"))
    planned = m.run.observation.planned

    assert planned is not None
    assert {link: m.carried(link) for link in planned.links} == planned.links


def test_a_run_that_copies_only_token_ids_has_no_copy_findings() -> None:
    html = page(measure(read_run(KEPT / "plain")))

    assert "Copies hidden" not in html
    assert "The next busiest is" not in html
    assert "PCIe idle" not in html


def test_the_study_page_contains_the_table_of_the_results_file(figures: dict[str, Any]) -> None:
    assert markdown(figures) in (REPO / "docs/observe-study.md").read_text(encoding="utf-8")


def test_kept_files_contain_no_paths_of_the_recording_machine() -> None:
    place = re.compile(r"(?<![\w.])/(?:work|root|home|opt|srv|tmp|var|mnt|usr)/")
    for path in KEPT.rglob("*"):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert not place.search(text), path
