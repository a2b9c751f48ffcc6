"""The learning-rate schedule wastes no step, decays like transformers and resumes to the bit."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from penstock.errors import SettingsError
from penstock.settings import ScheduleSettings, Settings
from penstock.train.learning_rate import LearningRateSchedule


def sgd(lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_after_warmup_the_schedule_has_the_shape_of_transformers(schedule: str) -> None:
    steps, warmup = 20, 5
    names = {"constant": "constant_with_warmup"}
    theirs, ours = sgd(0.5), sgd(0.1)
    reference = get_scheduler(names.get(schedule, schedule), theirs, warmup, steps)
    settings = Settings.of({"schedule": schedule, "warmup": 0.25})
    scheduler = LearningRateSchedule.of(settings, steps).scheduler(ours, taken=0, peak=0.5)
    for taken in range(steps):
        expected = reference.get_last_lr()[0] if taken >= warmup else 0.5 * (taken + 1) / 6
        assert scheduler.get_last_lr()[0] == pytest.approx(expected, abs=1e-12)
        for optimizer, stepped in ((theirs, reference), (ours, scheduler)):
            optimizer.step()
            stepped.step()


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("warmup", [0, 0.03, 0.5, 0.999, 1, 2, 100])
@pytest.mark.parametrize("steps", [1, 2, 3, 50])
def test_every_step_has_a_learning_rate_and_one_has_the_peak(
    schedule: str, warmup: float, steps: int
) -> None:
    rate = LearningRateSchedule.of(Settings.of({"schedule": schedule, "warmup": warmup}), steps)

    factors = [rate(taken) for taken in range(steps)]

    assert min(factors) > 0
    assert max(factors) == 1


def test_runs_of_earlier_versions_keep_a_warmup_that_begins_at_zero() -> None:
    settings = Settings.of({"warmup": 4})

    rate = LearningRateSchedule.of(settings, 20, from_zero=True)

    assert [rate(taken) for taken in range(5)] == [0, 0.25, 0.5, 0.75, 1]
    assert LearningRateSchedule.of(settings, 3, from_zero=True).warmup == 3


def test_a_resumed_schedule_continues_to_the_bit() -> None:
    rate = LearningRateSchedule("cosine", 3, 20)
    optimizer = sgd(0.5)
    scheduler = rate.scheduler(optimizer, taken=0, peak=0.5)
    for _ in range(11):
        optimizer.step()
        scheduler.step()

    resumed = rate.scheduler(sgd(0.5), taken=11, peak=0.5)

    assert resumed.get_last_lr() == scheduler.get_last_lr()


def test_warmup_is_a_fraction_below_1_and_steps_otherwise() -> None:
    for warmup, steps in ((0.25, 5), (0.01, 1), (1, 1), (3, 3), (30, 19)):
        settings = Settings(schedule=ScheduleSettings(warmup=warmup))
        assert LearningRateSchedule.of(settings, 20).warmup == steps


def test_wsd_is_constant_until_it_decays_linearly() -> None:
    values = {"schedule": "wsd", "warmup": 2, "decay": 4}
    rate = LearningRateSchedule.of(Settings.of(values), 12)
    assert [rate(taken) for taken in range(2, 13)] == [1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    assert LearningRateSchedule.of(Settings.of({"schedule": "wsd"}), 50).decay == 5
    assert LearningRateSchedule.of(Settings.of(values), 3).decay == 1


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_minimum_is_reached_at_the_end_and_never_undercut(schedule: str) -> None:
    settings = Settings.of({"schedule": schedule, "lr": 1e-3, "min_lr": 1e-4, "warmup": 0})
    rate = LearningRateSchedule.of(settings, 20)
    factors = [rate(taken) for taken in range(21)]
    assert factors[0] == 1
    assert factors[-1] == pytest.approx(0.1)
    assert min(factors) == factors[-1]


@pytest.mark.parametrize(
    "values", [{"min_lr": 2e-5}, {"min_lr": -1.0}, {"decay": 0.2}, {"schedule": "wsd", "decay": 0}]
)
def test_a_minimum_above_the_peak_and_a_decay_without_wsd_are_refused(
    values: dict[str, float],
) -> None:
    with pytest.raises(SettingsError):
        Settings.of(values)
