"""Run a training from its settings to the finished model.

Nothing is written into the output directory until everything is ready for the first step, so that
a mistake in the settings leaves the directory as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.engine.plan_choice import PlanChoice
from penstock.plan.plan import Plan
from penstock.planner.plan_view import plan_json
from penstock.settings import RUN_FILE, Settings, write_yaml
from penstock.tiers import Tier
from penstock.train.checkpoints import CheckpointSaver, write_model_files
from penstock.train.errors import explain_host_out_of_memory
from penstock.train.events import JsonLines, Listeners
from penstock.train.inputs import ModelSource, load_data, load_model, model_files_directory
from penstock.train.loggers import MetricsFile, check_loggers, open_loggers
from penstock.train.loop import TrainingLoop, TrainingRun
from penstock.train.plan_choice import choose_plan, describe_budget
from penstock.train.progress import LineView, LiveView, SilentView, View
from penstock.train.resume import OutputDirectory, ResumePoint
from penstock.train.signals import StopRequest
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

PLAN_FILE = "plan.json"

NOT_SELF_CHECKED = (
    "not self-checked: this run, or one that it continues, was started with --no-self-check, so "
    "nothing has compared it with plain transformers"
)


def train(
    settings: Settings,
    *,
    resume: bool,
    view: View,
    as_json: bool = False,
    profile: int | None = None,
) -> int:
    """Train, and return the exit code: 0 at the end, or 128 plus the number of a signal.

    Args:
        settings: Settings of the run.
        resume: Whether to continue from the newest checkpoint in the output directory.
        view: What the user sees.
        as_json: Whether to print events as JSON lines on standard output.
        profile: Number of steps to record, from the first one on.
    """
    check_loggers(settings.logging.log)
    listeners = Listeners([view])
    if as_json:
        listeners.add(JsonLines())
    directory = OutputDirectory(settings.checkpoint.out, resume=resume)
    try:
        point = directory.find_resume_point() if resume else None
        if resume:
            listeners.note(_describe_start(point, settings))
        with _open_run(settings, point, listeners, view) as run, StopRequest() as stop:
            stop.before_exit = view.close
            if profile is not None:
                from penstock.train.profile import StepProfiler

                listeners.add(StepProfiler(settings.checkpoint.out, profile, listeners.note))
            finished = TrainingLoop(run, listeners, view, stop).run()
            return 0 if finished else stop.exit_code
    finally:
        listeners.close()
        directory.close()


def pick_view(as_json: bool) -> View:
    """Choose the view for standard output: a terminal, a pipe, or a program that reads JSON."""
    if as_json:
        return SilentView()
    live = LiveView()
    return live if live.console.is_terminal else LineView()


@contextlib.contextmanager
def _open_run(
    settings: Settings, resume: ResumePoint | None, listeners: Listeners, view: View
) -> Iterator[TrainingRun]:
    """Load the inputs, choose the plan and prepare the engine, which is closed at the end."""
    if resume is not None:
        resume.check_formats(settings)
    model = load_model(settings, resume.checkpoint.path if resume else None)
    data = load_data(settings, model, listeners, view.show_work)
    batches = data.batches(settings, resume.state.data if resume else None)
    choice, remarks = choose_plan(settings, model, batches.steps, resume)
    _report_plan(choice, batches.steps, listeners, view)
    for remark in remarks:
        listeners.note(remark)
    changes: list[str] = []
    engine = _prepare_engine(settings, model, choice, resume, view, changes)
    try:
        if engine.plan_change:
            listeners.note(engine.plan_change)
        if not engine.self_checked:
            listeners.note(NOT_SELF_CHECKED)
        if resume is not None:
            changes += resume.differences(settings, steps=batches.steps)
            _report_differences(changes, listeners)
        saver = CheckpointSaver(engine, settings)
        saver.saved_step = resume.checkpoint.step if resume else None
        saver.check_space()
        _write_run_files(settings, model, engine.plan, batches.steps)
        listeners.add(MetricsFile(settings.checkpoint.out, after=batches.step))
        for logger in open_loggers(settings):
            listeners.add(logger)
        yield TrainingRun(settings, engine, data, batches, saver, resume is not None)
    finally:
        engine.close()


def _prepare_engine(
    settings: Settings,
    model: ModelSource,
    choice: PlanChoice,
    resume: ResumePoint | None,
    view: View,
    changes: list[str],
) -> Engine:
    """Prepare the engine. On a resume, add what differs from the checkpoint to `changes`."""
    from penstock.engine.prepare import prepare

    # A resumed run reads config and weights from the checkpoint, which has no revision.
    arguments: dict[str, Any] = {} if resume is None else {"init": "none", "revision": None}
    with explain_host_out_of_memory():
        engine = prepare(
            model.source, plan=choice, settings=settings, progress=view.show_work, **arguments
        )
        if resume is not None:
            try:
                view.show_work(0, 0, "loading weights")
                engine.read(resume.checkpoint.path, on_difference=changes.extend)
            except BaseException:
                engine.close()
                raise
    return engine


def _report_plan(choice: PlanChoice, steps: int, listeners: Listeners, view: View) -> None:
    view.show_plan(choice, steps)
    plan = choice.plan
    fields = plan_json(choice.planned) if choice.planned else {
        "tiers": {
            tier.value: {"budget": plan.budget.of(tier), "at_rest": plan.at_rest(tier),
                         "peak": plan.peak(tier)}
            for tier in Tier
        },
        "bytes_per_parameter": plan.bytes_per_parameter,
    }  # fmt: skip
    fields.pop("feasible", None)
    listeners.emit("plan", **fields, parameters=plan.parameters, steps=steps)


def _report_differences(changes: list[str], listeners: Listeners) -> None:
    from penstock.engine.result_record import describe_differences

    if changes:
        # Some settings, such as `clip`, are also known to the engine.
        listeners.note(describe_differences(list(dict.fromkeys(changes))))


def _write_run_files(settings: Settings, model: ModelSource, plan: Plan, steps: int) -> None:
    """Write the model's config and tokenizer, the plan, and the settings."""
    out = Path(settings.checkpoint.out)
    source = model_files_directory(settings, model)
    write_model_files(out, source, model.config, model.inventory, settings)
    plan.save(out / PLAN_FILE)
    remarks = [f"Penstock {__version__}; {steps} steps; {PLAN_FILE} has the placement"]
    remarks += describe_budget(plan.budget, plan.workload)
    write_yaml(settings, out / RUN_FILE, remarks)


def _describe_start(resume: ResumePoint | None, settings: Settings) -> str:
    if resume is None:
        return f"{settings.checkpoint.out} has no checkpoint: training starts from scratch"
    return f"resuming from {resume.checkpoint.path}"
