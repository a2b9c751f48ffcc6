"""Waits of ranks for each other, from the events of all of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from penstock.observe.findings import find
from penstock.observe.measures import measure
from penstock.observe.page import page, report_json
from penstock.observe.peers import PEERS, peer_waits
from penstock.observe.records import Event, Phase, RecordedRun
from penstock.observe.run_files import read_run
from tests.observe.synthetic_runs import make_run, write_run

STEPS = 4


def rank(gathers: tuple[float, float], meet: float, clock: float = 0.0) -> RecordedRun:
    """Return a rank whose steps of one second have two gathers of a layer and a meeting.

    Its clock is `clock` seconds ahead, as on another machine.
    """
    phases, events = [], []
    for step in range(1, STEPS + 1):
        start = clock + step
        phases += [Phase("forward", step, start, start + 0.4)]
        phases += [Phase("backward", step, start + 0.4, start + 1.0)]
        events += [Event("gpu", "compute", "forward a", start + 0.5, start + 1.0, step, "forward")]
        for at, seconds in zip((0.0, 0.3), gathers, strict=True):
            began = start + at
            events += [Event(PEERS, "peers", "gather a", began, began + seconds, step, "forward")]
        events += [
            Event(PEERS, "peers", "meet head", start + 1 - meet, start + 1, step, "backward")
        ]
    return make_run(phases, events, [])


def together(**ranks: RecordedRun) -> RecordedRun:
    named = {name.replace("_", "-"): run for name, run in ranks.items()}
    return replace(named["rank-0"], ranks=named)


def test_ranks_wait_for_the_one_that_comes_last() -> None:
    """Rank 1 is last to the first gather and to the meeting, rank 0 to the second gather."""
    run = together(rank_0=rank((0.25, 0.02), 0.11), rank_1=rank((0.05, 0.07), 0.01, clock=5000.0))

    found = peer_waits(run)

    assert found is not None
    assert found.steps == STEPS
    assert {name: round(s, 6) for name, s in found.waited.items()} == {
        "rank-0": 0.3, "rank-1": 0.05,
    }  # fmt: skip
    assert {name: round(s, 6) for name, s in found.late.items()} == {"rank-0": 0.05, "rank-1": 0.3}


def test_waits_for_peers_are_a_finding_with_the_late_rank() -> None:
    run = together(rank_0=rank((0.25, 0.02), 0.11), rank_1=rank((0.05, 0.02), 0.01))

    (finding,) = [f for f in find(measure(run)) if f.kind == "peers"]

    assert finding.level == "warn"
    assert finding.text == (
        "waits for peers: rank 0 waited 300 ms per step for other ranks (rank 1 0 s). Rank 1 was "
        "late: others waited 300 ms per step for it"
    )
    assert round(finding.seconds, 6) == 0.3


def test_short_waits_and_single_ranks_are_no_finding() -> None:
    even = rank((0.05, 0.02), 0.01)

    for run in (together(rank_0=even, rank_1=rank((0.06, 0.02), 0.01)), even):
        assert not [f for f in find(measure(run)) if f.kind == "peers"]
    assert peer_waits(even) is None
    assert peer_waits(together(rank_0=even)) is None


def test_what_ranks_do_together_is_not_compute() -> None:
    found = measure(rank((0.25, 0.02), 0.11))

    assert round(found.busy["gpu"], 6) == 0.5
    assert round(found.waits[("ranks",)], 6) == 0.27


def test_one_page_shows_phases_and_waits_of_all_ranks(tmp_path: Path) -> None:
    run = together(rank_0=rank((0.25, 0.02), 0.11), rank_1=rank((0.05, 0.02), 0.01))
    measures = measure(run)

    html = page(measures)

    for text in ("waits for peers", "others wait for it", "rank-1", "backward"):
        assert text in html
    ranks = json.loads(json.dumps(report_json(measures, find(measures), tmp_path)))["ranks"]
    assert list(ranks) == ["rank-0", "rank-1"]
    assert round(ranks["rank-0"]["peer_wait_seconds"], 6) == 0.3
    assert round(ranks["rank-1"]["late_seconds"], 6) == 0.3
    assert round(ranks["rank-1"]["phases"]["backward"], 6) == 0.6


def test_rank_0_and_the_machine_may_be_one_recording(tmp_path: Path) -> None:
    write_run(rank((0.25, 0.02), 0.11), tmp_path)
    write_run(rank((0.05, 0.02), 0.01), tmp_path / "rank-1")

    run = read_run(tmp_path)

    assert list(run.ranks) == ["rank-0", "rank-1"]
    assert run.ranks["rank-0"].phases == run.phases
    assert len(run.samples) == len(run.ranks["rank-0"].samples)
    assert peer_waits(run) is not None
