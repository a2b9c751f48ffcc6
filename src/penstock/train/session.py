"""Run a training from its settings to the finished model.

Nothing is written into the output directory until everything is ready for the first step, so that
a mistake in the settings leaves the directory as it was.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.errors import UNREADABLE
from penstock.checkpoint.manifest import Checkpoint, step_of
from penstock.checkpoint.run_directory import CheckpointList, list_checkpoints, set_aside
from penstock.checkpoint.training_state import STATE
from penstock.data.errors import PositionError
from penstock.durable_files import name_file
from penstock.engine.plan_choice import PlanChoice, check_budget
from penstock.errors import PlanError, SettingsError
from penstock.planner.plan_view import plan_json
from penstock.records import named_by
from penstock.settings import RUN_FILE, Settings, write_yaml
from penstock.tiers import Tier
from penstock.train.checkpoints import CheckpointSaver
from penstock.train.errors import explain_host_out_of_memory
from penstock.train.events import JsonLines, Listeners
from penstock.train.inputs import ModelSource, TrainingData, load_data, load_model
from penstock.train.learning_rate import LearningRateSchedule
from penstock.train.loop import TrainingLoop, TrainingRun
from penstock.train.metrics_file import MetricsFile
from penstock.train.output_directory import OutputDirectory
from penstock.train.plan_choice import choose_plan, describe_budget
from penstock.train.progress import LineView, LiveView, SilentView, View
from penstock.train.resume import ResumePoint, find_resumable, load_resume_point
from penstock.train.run_id import find_run_id, new_run_id
from penstock.train.signals import StopRequest, guard_output
from penstock.train.trackers import check_trackers, open_trackers
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.data.batches import Batches
    from penstock.engine.engine import Engine

PLAN_FILE = "plan.json"

FEW_STEPS = 10
"""A run with fewer steps is reported: it learns little."""

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
    stop = StopRequest()
    with guard_output(stop):
        return _train(settings, resume, view, as_json, profile, stop)


def _train(
    settings: Settings,
    resume: bool,
    view: View,
    as_json: bool,
    profile: int | None,
    stop: StopRequest,
) -> int:
    check_trackers(settings.logging.log)
    if settings.schedule.lr == 0:
        raise SettingsError("lr", "must be greater than 0: no step would change a weight, got 0")
    if settings.memory.plan is None:
        check_budget(settings.memory.budgets)  # before the data is tokenized, which may take hours
    listeners = Listeners([view])
    if as_json:
        listeners.add(JsonLines())
    with name_file(settings.checkpoint.out):
        directory = OutputDirectory(settings.checkpoint.out, resume=resume)
    try:
        with contextlib.ExitStack() as opened:
            if resume:
                run = _resume_run(settings, directory, listeners, view, opened)
            else:
                new = _open_run(settings, directory, None, listeners, view, new_run_id())
                run = opened.enter_context(new)
            opened.enter_context(stop)
            stop.before_exit = view.close
            if profile is not None:
                from penstock.train.profile import StepProfiler

                listeners.add(StepProfiler(settings.checkpoint.out, profile, listeners.note))
            finished = TrainingLoop(run, listeners, view, stop).run()
            return 0 if finished else stop.exit_code
    finally:
        listeners.close()
        directory.close()


def _resume_run(
    settings: Settings,
    directory: OutputDirectory,
    listeners: Listeners,
    view: View,
    opened: contextlib.ExitStack,
) -> TrainingRun:
    """Open a run at its newest checkpoint that is not damaged, or from scratch without any."""
    found = list_checkpoints(directory.path)
    run_id = find_run_id(directory.path, found.whole)
    candidates = find_resumable(directory.path, found)
    if not candidates:
        listeners.note(f"{settings.checkpoint.out} has no checkpoint: training starts from scratch")
        new = _open_run(settings, directory, None, listeners, view, run_id)
        return opened.enter_context(new)
    damaged: list[tuple[Checkpoint, Exception]] = []
    for checkpoint in candidates:
        _note_start(checkpoint, found, listeners)
        try:
            point = load_resume_point(checkpoint)
            resumed = _open_run(settings, directory, point, listeners, view, run_id)
            run = opened.enter_context(resumed)
        except UNREADABLE as error:
            damaged.append((checkpoint, error.with_traceback(None)))
            listeners.note(f"warning: {checkpoint.path} is damaged. {error}")
            continue
        for skipped, _ in damaged:
            aside = set_aside(skipped.path)
            listeners.note(
                f"warning: {skipped.path} was renamed to {aside.name}; training continues from "
                f"step {checkpoint.step}. Remove {aside.name} when you do not need it"
            )
        return run
    (_, first), *others = damaged
    for checkpoint, _ in others:
        first.add_note(f"{checkpoint.path}, the older checkpoint, is damaged as well")
    raise first


def _note_start(checkpoint: Checkpoint, found: CheckpointList, listeners: Listeners) -> None:
    """Say where the run continues, and which newer checkpoints are not complete."""
    for error in found.damaged:
        step = step_of(Path(error.path).name)
        if step is not None and step > checkpoint.step:
            listeners.note(f"warning: not a complete checkpoint: {error}")
    listeners.note(f"resuming from {checkpoint.path}")
    if not checkpoint.manifest.has_checksums:
        listeners.note(
            f"note: {checkpoint.path} was saved by an earlier version, without checksums: damage "
            f"by the disk would not be found"
        )


def pick_view(as_json: bool) -> View:
    """Choose the view for standard output: a terminal, a pipe, or a program that reads JSON."""
    if as_json:
        return SilentView()
    live = LiveView()
    return live if live.console.is_terminal else LineView()


@contextlib.contextmanager
def _open_run(
    settings: Settings,
    directory: OutputDirectory,
    resume: ResumePoint | None,
    listeners: Listeners,
    view: View,
    run_id: str,
) -> Iterator[TrainingRun]:
    """Load the inputs, choose the plan and prepare the engine, which is closed at the end."""
    if resume is not None:
        resume.check_formats(settings)
        settings = resume.with_recorded_sizes(settings)
    model = load_model(settings, resume.checkpoint.path if resume else None)
    settings, data = load_data(settings, model, listeners.note, view.show_work)
    batches = _open_batches(settings, data, resume)
    rate = LearningRateSchedule.of(
        settings, batches.steps, from_zero=resume is not None and resume.warmup_from_zero
    )
    if resume is not None and batches.step >= batches.steps:
        listeners.note(_describe_finished(settings, batches.steps))
    choice, remarks = choose_plan(settings, model, batches.steps, resume)
    _report_plan(choice, batches.steps, listeners, view)
    for remark in (*remarks, *_describe_short_run(settings, batches.steps)):
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
        saver = CheckpointSaver(engine, settings, directory, listeners.note, run_id)
        saver.saved_step = resume.checkpoint.step if resume else None
        saver.check_space()
        with name_file(settings.checkpoint.out):
            assert engine.model_files is not None
            if resume is not None and resume.checkpoint.manifest.has_checksums:
                # Their checksums were compared, unlike those of the copies in --out.
                engine.model_files = engine.model_files.keep_contents(resume.checkpoint.path)
            _write_run_files(settings, engine, batches.steps, run_id)
            # Checkpoints are written from memory: other files may be gone when they are saved.
            folder = settings.checkpoint.model_directory
            engine.model_files = engine.model_files.keep_contents(folder)
        after, note = batches.step, listeners.note
        metrics = MetricsFile(settings.checkpoint.out, after=after, note=note)
        listeners.add(metrics)
        saver.before_save.append(metrics.sync)
        directory.on_change += [
            lambda _: _write_run_files(saver.settings, engine, batches.steps, run_id),
            metrics.follow,
        ]
        for tracker in open_trackers(settings, after=after, note=note):
            listeners.add(tracker)
        yield TrainingRun(settings, engine, data, batches, saver, rate, resume is not None)
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
    arguments: dict[str, Any] = {} if resume is None else {"init": "none"}
    if resume is not None and not settings.model.lora:
        arguments["revision"] = None
    with explain_host_out_of_memory(), named_by(settings.memory.plan or "", PlanError):
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
    for name in ("feasible", "not_trainable"):  # of `penstock plan`; a run has passed both
        fields.pop(name, None)
    workload = plan.workload
    fields |= {"context": workload.context, "batch": workload.batch}
    listeners.emit("plan", **fields, parameters=plan.parameters, steps=steps)


def _open_batches(settings: Settings, data: TrainingData, resume: ResumePoint | None) -> Batches:
    """Return the batches, from where the resumed checkpoint was in the data."""
    try:
        return data.batches(settings, resume.state.data if resume else None)
    except PositionError as wrong:
        if resume is not None:
            wrong.add_note(f"the position is in {resume.checkpoint.path / STATE}")
        raise


def _describe_short_run(settings: Settings, steps: int) -> list[str]:
    """Say that a run is short, unless the user asked for the number of steps."""
    if steps >= FEW_STEPS or settings.schedule.steps is not None:
        return []
    epochs = settings.schedule.epochs or 1
    more = math.ceil(epochs * FEW_STEPS / steps)
    noun = "step" if steps == 1 else "steps"
    return [
        f"note: the run has only {steps} {noun}; with --epochs {more} it has "
        f"{math.ceil(steps * more / epochs)}"
    ]


def _describe_finished(settings: Settings, steps: int) -> str:
    """Say that a resumed run has nothing left to do, and how to train longer."""
    epochs, noun = settings.schedule.epochs or 1, "step" if steps == 1 else "steps"
    given = settings.schedule.steps is not None
    more = f"--steps {2 * steps}" if given else f"--epochs {epochs + 1:g}"
    return (
        f"note: the run in {settings.checkpoint.out} is finished after {steps} {noun}. To train "
        f"longer, pass a larger number of steps or epochs, for example --resume {more}"
    )


def _report_differences(changes: list[str], listeners: Listeners) -> None:
    from penstock.engine.result_record import describe_differences

    if changes:
        # Some settings, such as `clip`, are also known to the engine.
        listeners.note(describe_differences(list(dict.fromkeys(changes))))


def _write_run_files(settings: Settings, engine: Engine, steps: int, run_id: str) -> None:
    """Write the model's config and tokenizer, the plan, and the settings."""
    out, plan = Path(settings.checkpoint.out), engine.plan
    assert engine.model_files is not None
    model_directory = settings.checkpoint.model_directory
    model_directory.mkdir(exist_ok=True)
    engine.model_files.write(model_directory)
    plan.save(out / PLAN_FILE)
    remarks = [f"Penstock {__version__}; {steps} steps; {PLAN_FILE} has the placement"]
    remarks += describe_budget(plan.budget, plan.workload)
    write_yaml(settings, out / RUN_FILE, remarks, run_id=run_id)
