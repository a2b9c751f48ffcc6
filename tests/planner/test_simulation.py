"""Simulated jobs over shared resources take as long as arithmetic predicts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.cost.simulation import Job, critical_path, share, simulate


def ends(jobs: list[Job]) -> list[float]:
    return [span.end for span in simulate(jobs)]


def test_jobs_of_one_lane_run_one_after_the_other() -> None:
    assert ends([Job("gpu", {"gpu": 1.0}), Job("gpu", {"gpu": 2.0})]) == pytest.approx([1, 3])


def test_lanes_without_common_resources_overlap() -> None:
    assert ends([Job("a", {"x": 1.0}), Job("b", {"y": 2.0})]) == pytest.approx([1, 2])


def test_two_jobs_on_one_resource_take_twice_as_long() -> None:
    assert ends([Job("a", {"x": 1.0}), Job("b", {"x": 1.0})]) == pytest.approx([2, 2])


def test_the_remaining_job_gets_the_whole_resource() -> None:
    # Both run at half speed until the short one ends at 2 s. The long one then has 1 s left.
    assert ends([Job("a", {"x": 1.0}), Job("b", {"x": 2.0})]) == pytest.approx([2, 3])


def test_a_job_limited_elsewhere_leaves_the_bus_to_others() -> None:
    # The copy is limited by its link and uses a tenth of the bus; the sweep by its cores.
    copy, sweep = Job("a", {"link": 10.0, "bus": 1.0}), Job("b", {"cores": 1.0, "bus": 0.9})

    assert ends([copy, sweep]) == pytest.approx([10, 1])


def test_a_job_waits_only_for_the_jobs_it_names() -> None:
    jobs = [Job("a", {"x": 3.0}), Job("b", {"y": 1.0}), Job("c", {"z": 1.0}, after=(0, 1))]

    assert ends(jobs) == pytest.approx([3, 1, 4])


def test_jobs_without_demands_take_no_time() -> None:
    jobs = [Job("", {}), Job("a", {"x": 1.0}, after=(0,)), Job("", {}, after=(1,))]
    jobs += [Job("a", {"x": 1.0}, after=(2,))]

    assert ends(jobs) == pytest.approx([0, 1, 1, 2])


def test_the_critical_path_skips_jobs_with_slack() -> None:
    jobs = [Job("a", {"x": 3.0}), Job("b", {"y": 1.0}), Job("c", {"z": 1.0}, after=(0, 1))]

    assert critical_path(simulate(jobs)) == [0, 2]


demands = st.dictionaries(st.sampled_from("abcd"), st.floats(0.01, 10), min_size=1)


@given(st.lists(demands, min_size=1, max_size=6))
def test_no_resource_is_overcommitted(wanted: list[dict[str, float]]) -> None:
    speeds = share(wanted)

    for resource in "abcd":
        load = sum(s * d.get(resource, 0.0) for s, d in zip(speeds, wanted, strict=True))
        assert load <= 1 + 1e-6
    for speed, d in zip(speeds, wanted, strict=True):
        assert 0 < speed <= (1 + 1e-6) / max(d.values())


@given(st.lists(st.tuples(st.sampled_from("pqr"), demands), min_size=1, max_size=12))
def test_the_total_time_is_between_the_busiest_resource_and_the_sum_of_all_jobs(
    work: list[tuple[str, dict[str, float]]],
) -> None:
    jobs = [Job(lane, wanted) for lane, wanted in work]
    busiest = max(sum(j.demands.get(r, 0.0) for j in jobs) for r in "abcd")

    end = max(ends(jobs))

    assert busiest * (1 - 1e-6) <= end <= sum(j.alone for j in jobs) * (1 + 1e-6)


def test_a_job_may_wait_for_another_one_for_two_reasons() -> None:
    jobs = [Job("a", {"gpu": 1.0}), Job("a", {"gpu": 2.0}, after=(0, 0)), Job("", {}, after=(1, 0))]

    assert [span.end for span in simulate(jobs)] == [1.0, 3.0, 3.0]
