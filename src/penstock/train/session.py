"""From settings to a finished run. Room: show.

Nothing is written into the run's directory until all is ready for the first step: a mistake in the
settings leaves it as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.planner.plan_view import plan_json
from penstock.settings import RUN_FILE, Settings, write_yaml
from penstock.tiers import Tier
from penstock.train.checkpoints import CheckpointSaver, write_companions
from penstock.train.events import JsonLines, Listener, Listeners
from penstock.train.inputs import Model, companions_directory, find_data, find_model
from penstock.train.loggers import MetricsFile, check_loggers, open_loggers
from penstock.train.loop import Loop, TrainingRun
from penstock.train.plan_choice import Chosen, choose_plan, describe_budget
from penstock.train.progress import Lines, Live, Silent, View
from penstock.train.resume import OutFolder, Past
from penstock.train.signals import Stopping
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

PLAN_FILE = "plan.json"


def train(
    settings: Settings,
    *,
    resume: bool,
    view: View,
    as_json: bool = False,
    profile: int | None = None,
) -> int:
    """The exit code: 0 at the end, 128 and the signal where one stopped it. The first `profile`
    steps are recorded."""
    check_loggers(settings.logging.log)
    listeners = Listeners([view])
    if as_json:
        listeners.add(JsonLines())
    out = OutFolder(settings.checkpoint.out, resume=resume)
    try:
        past = out.past() if resume else None
        if resume:
            listeners.note(_about_past(past, settings))
        with _opened(settings, past, listeners, view) as run, Stopping() as stopping:
            stopping.before_leaving = view.close
            if profile is not None:
                listeners.add(_profiled(settings, profile, listeners))
            ended = Loop(run, listeners, view, stopping).run()
            return 0 if ended else stopping.exit_code
    finally:
        listeners.close()
        out.close()


def pick_view(as_json: bool) -> View:
    """What suits where it is shown."""
    if as_json:
        return Silent()
    live = Live()
    return live if live.console.is_terminal else Lines()


def _profiled(settings: Settings, steps: int, listeners: Listeners) -> Listener:
    from penstock.train.profile import ProfiledSteps

    return ProfiledSteps(settings.checkpoint.out, steps, listeners.note)


@contextlib.contextmanager
def _opened(
    settings: Settings, past: Past | None, listeners: Listeners, view: View
) -> Iterator[TrainingRun]:
    model = find_model(settings, past.checkpoint.path if past else None)
    data = find_data(settings, model, listeners, view.busy)
    batches = data.batches(settings, past.state.data if past else None)
    chosen = choose_plan(settings, model, batches.steps, past)
    _tell_plan(chosen, batches.steps, listeners, view)
    if chosen.remark:
        listeners.note(chosen.remark)
    engine = _engine(settings, model, chosen, past, view)
    try:
        if past is not None:
            gpu = engine.device.torch_device.type == "cuda"
            numerics, steps = engine.workload.numerics, batches.steps
            found = past.differences(settings, numerics, steps=steps, on_gpu=gpu)
            if found:
                listeners.note(f"no longer bit-identical because {'; '.join(found)}")
        keeper = CheckpointSaver(engine, settings)
        keeper.saved_step = past.checkpoint.step if past else None
        keeper.check_room()
        _write_papers(settings, model, chosen, batches.steps)
        listeners.add(MetricsFile(settings.checkpoint.out, after=batches.step))
        for logger in open_loggers(settings):
            listeners.add(logger)
        yield TrainingRun(settings, engine, data, batches, keeper, past is not None)
    finally:
        engine.close()


def _engine(
    settings: Settings, model: Model, chosen: Chosen, past: Past | None, view: View
) -> Engine:
    from penstock.engine.prepare import prepare
    from penstock.train.failures import memory_told

    view.busy(0, 0, "loading weights")
    # A resumed run reads weights and config from the checkpoint, whatever the model's revision.
    arguments: dict[str, Any] = {} if past is None else {"init": "none", "revision": None}
    with memory_told(chosen.plan):
        engine = prepare(model.source, plan=chosen.plan, settings=settings, **arguments)
        if past is not None:
            try:
                engine.read(past.checkpoint.path)
            except BaseException:
                engine.close()
                raise
    return engine


def _tell_plan(chosen: Chosen, steps: int, listeners: Listeners, view: View) -> None:
    view.show_plan(chosen, steps)
    plan = chosen.plan
    told = plan_json(chosen.planned) if chosen.planned else {
        "tiers": {
            tier.value: {"budget": plan.budget.of(tier), "at_rest": plan.at_rest(tier),
                         "peak": plan.peak(tier)}
            for tier in Tier
        },
        "bytes_per_parameter": plan.bytes_per_parameter,
    }  # fmt: skip
    told.pop("feasible", None)
    listeners.tell("plan", **told, parameters=plan.parameters, steps=steps)


def _write_papers(settings: Settings, model: Model, chosen: Chosen, steps: int) -> None:
    """What a checkpoint takes its small files from, and what the run was."""
    out = Path(settings.checkpoint.out)
    write_companions(
        out, companions_directory(settings, model), model.config, model.inventory, settings
    )
    chosen.plan.save(out / PLAN_FILE)
    plan = chosen.plan
    remarks = [f"Penstock {__version__}; {steps} steps; {PLAN_FILE} says what rests where"]
    remarks += describe_budget(plan.budget, plan.workload)
    write_yaml(settings, out / RUN_FILE, remarks)


def _about_past(past: Past | None, settings: Settings) -> str:
    if past is None:
        return f"{settings.checkpoint.out} holds no checkpoint: the run begins anew"
    return f"going on from {past.checkpoint.path}"
