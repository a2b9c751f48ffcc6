"""Reports of ranks at the end of a step."""

from __future__ import annotations

import math

import pytest

from penstock.engine.report import StepReport, join, share
from penstock.engine.transport import SingleRank
from penstock.optim.norms import GradStats

REPORT = StepReport(GradStats((1 << 700) + 5, 2.5, None), ((0, 0.1), (3, -0.0), (6, 1e300)))


@pytest.mark.parametrize(
    "report",
    [
        REPORT,
        StepReport(GradStats(0, 0.0, None), ()),
        StepReport(GradStats(0, math.inf, (4, 2)), ((1, math.inf),)),
    ],
)
def test_a_report_survives_its_message(report: StepReport) -> None:
    message = report.pack(5)

    assert StepReport.unpack(message) == report
    assert len(message) == len(REPORT.pack(5))


def test_losses_are_added_in_the_order_of_the_batch() -> None:
    first = StepReport(GradStats(3, 1.0, None), ((0, 1e16), (2, 1.0)))
    second = StepReport(GradStats(4, 2.0, None), ((1, 1.0), (3, -1e16)))

    both = join([second, first])

    assert both.losses == ((0, 1e16), (1, 1.0), (2, 1.0), (3, -1e16))
    assert both.loss == ((1e16 + 1.0) + 1.0) - 1e16
    assert (both.stats.units, both.stats.max_abs) == (7, 2.0)


def test_the_first_bad_tensor_is_the_first_that_backward_meets() -> None:
    reports = [StepReport(GradStats(0, math.inf, bad), ()) for bad in ((1, 0), (4, 3), (4, 2))]

    for order in (reports, reports[::-1]):
        assert join(order).stats.first_bad == (4, 2)
    assert not join(reports).stats.finite


def test_a_single_rank_keeps_its_report() -> None:
    assert share(REPORT, SingleRank(), 3) == REPORT
