"""The watchdog reports a run without progress, and only such a run."""

from __future__ import annotations

import threading

from penstock.train.watchdog import Watchdog


def test_the_watchdog_reports_what_a_stuck_run_waits_for() -> None:
    reports: list[str] = []
    reported = threading.Event()

    def report(text: str) -> None:
        reports.append(text)
        reported.set()

    with Watchdog(lambda: "read of layer 3", report, patience=0.05) as watchdog:
        watchdog.report_progress("forward layer 3")
        assert reported.wait(30)
    assert "in forward layer 3: waiting for read of layer 3" in reports[0]


def test_the_watchdog_waits_longer_if_earlier_pauses_were_long() -> None:
    reports: list[str] = []
    watchdog = Watchdog(lambda: "", reports.append, patience=0.02)
    watchdog._longest = 1e6
    with watchdog:
        watchdog.report_progress("a step")
        assert not watchdog._end.wait(0.3)
    assert reports == []
