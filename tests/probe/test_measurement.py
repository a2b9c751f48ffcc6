"""Sampling of links with a known rate. Nothing here depends on real time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from penstock.probe.measurement import Effort, collect_samples, measure_rate, measure_time
from penstock.units import GiB, KiB, MiB
from tests.support.probing import TINY


@dataclass
class FakeLink:
    """Moves bytes at a fixed rate. The first use is slow, as with every cold link."""

    rate: float
    first: float = 5.0
    runs: list[int] = field(default_factory=list)
    spent: float = 0.0

    def run(self, count: int) -> float:
        seconds = count / self.rate + (self.first if not self.runs else 0.0)
        self.runs.append(count)
        self.spent += seconds
        return seconds


@pytest.mark.parametrize("rate", [33e6, 55.3e9, 4e12])
def test_a_link_of_known_rate_is_reported_at_that_rate(rate):
    figure = measure_rate(FakeLink(rate, first=0).run, TINY, unit=MiB, limit=GiB)
    assert figure.low == pytest.approx(rate)
    assert figure.median == pytest.approx(rate)
    assert figure.high == pytest.approx(rate)
    assert figure.samples >= 3


def test_warm_up_runs_are_not_counted():
    figure = measure_rate(FakeLink(1e9, first=5.0).run, TINY, unit=MiB, limit=GiB)
    assert figure.low == pytest.approx(1e9)


def test_measure_time_returns_the_inverse_of_the_rate():
    figure = measure_time(FakeLink(10e6, first=0).run, TINY, unit=1000, limit=10**6)
    assert figure.median == pytest.approx(100e-9)


def test_low_and_high_are_the_extremes_of_the_samples():
    three = Effort(slice_seconds=0.01, host_bytes=MiB, min_samples=3, max_samples=3)
    rates = iter([1e6, 1e6, 4e9, 1e9, 2e9])  # two runs choose the amount and warm up
    figure = measure_rate(lambda n: n / next(rates), three, unit=MiB, limit=MiB)
    assert (figure.low, figure.median, figure.high) == pytest.approx((1e9, 2e9, 4e9))


@pytest.mark.parametrize("rate", [1e6, 33e6, 1e9, 1e12])
def test_a_slow_link_does_not_exceed_its_slice(rate):
    link, effort = FakeLink(rate, first=0), Effort(slice_seconds=0.3, host_bytes=GiB)
    collect_samples(link.run, effort, unit=MiB, limit=GiB)
    smallest = MiB / rate  # no run can be shorter
    assert link.spent <= max(2.5 * effort.slice_seconds, 6 * smallest)


def test_runs_are_multiples_of_the_unit_within_the_limit():
    link = FakeLink(1e9, first=0)
    collect_samples(link.run, TINY, unit=3 * KiB, limit=100 * KiB)
    assert all(n % (3 * KiB) == 0 and n <= 100 * KiB for n in link.runs)
