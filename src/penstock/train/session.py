"""Run a training from its settings to the finished model.

Nothing is written into the output directory until everything is ready for the first step, so that
a mistake in the settings leaves the directory as it was.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.errors import UNREADABLE
from penstock.checkpoint.manifest import Checkpoint, step_of
from penstock.checkpoint.run_directory import CheckpointList, list_checkpoints, set_aside
from penstock.checkpoint.training_state import STATE
from penstock.data.errors import PositionError, SourceError
from penstock.durable_files import name_file
from penstock.engine.plan_choice import PlanChoice, check_budget
from penstock.engine.startup import DATA, IMPORT, PLAN, SURVEY, WEIGHTS, StartUp
from penstock.errors import PlanError, SettingsError
from penstock.planner.plan_view import plan_json
from penstock.rank_place import STARTED
from penstock.records import named_by, to_json
from penstock.settings import RUN_FILE, Settings, write_yaml
from penstock.tiers import Tier
from penstock.train.checkpoints import CheckpointSaver
from penstock.train.errors import explain_host_out_of_memory
from penstock.train.events import JsonLines, Listeners
from penstock.train.follower import follow
from penstock.train.inputs import (
    ModelSource,
    TrainingData,
    load_data,
    load_model,
    prepare_arguments,
)
from penstock.train.launch import check_several_ranks
from penstock.train.learning_rate import LearningRateSchedule
from penstock.train.loop import TrainingLoop, TrainingRun
from penstock.train.metrics_file import MetricsFile
from penstock.train.output_directory import OutputDirectory
from penstock.train.plan_choice import choose_plan, describe_budget
from penstock.train.progress import LineView, LiveView, SilentView, View
from penstock.train.rank_commands import RankLeader
from penstock.train.resume import ResumePoint, find_resumable, load_resume_point
from penstock.train.resumed_model import check_tensors, keep_model
from penstock.train.run_id import find_run_id, new_run_id
from penstock.train.signals import StopRequest, guard_output
from penstock.train.trackers import check_trackers, open_trackers
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.data.batches import Batches
    from penstock.distributed.rank_group import RankGroup
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
    group: RankGroup | None = None,
) -> int:
    """Train, and return the exit code: 0 at the end, or 128 plus the number of a signal.

    With several ranks, every rank calls this. Rank 0 leads, and the others follow.

    Args:
        settings: Settings of the run.
        resume: Whether to continue from the newest checkpoint in the output directory.
        view: What the user sees.
        as_json: Whether to print events as JSON lines on standard output.
        profile: Number of steps to record, from the first one on.
        group: This process among the ranks of the run; None if it is alone.
    """
    from penstock.distributed.rank_group import single_rank

    group = group or single_rank()
    stop = StopRequest(quiet=not group.talks or group.launched)
    with guard_output(stop):
        if not group.talks:
            return follow(settings, group, stop)
        leader = RankLeader(group.transport, stop)
        code = _train(settings, resume, view, as_json, profile, stop, group, leader)
        leader.end(code)
        return code


def _train(
    settings: Settings,
    resume: bool,
    view: View,
    as_json: bool,
    profile: int | None,
    stop: StopRequest,
    group: RankGroup,
    leader: RankLeader,
) -> int:
    start_up = StartUp.of_process()
    check_trackers(settings.logging.log)
    if settings.schedule.lr == 0:
        raise SettingsError("lr", "must be greater than 0: no step would change a weight, got 0")
    _check_ranks(settings, group)
    if settings.memory.plan is None:
        check_budget(settings.memory.budgets)  # before the data is tokenized, which may take hours
    listeners = Listeners([view])
    if as_json:
        listeners.add(JsonLines())
    with name_file(settings.checkpoint.out):
        directory = OutputDirectory(settings.checkpoint.out, resume=resume)
    context = _Session(directory, listeners, view, group, leader, start_up)
    try:
        with contextlib.ExitStack() as opened:
            _check_shared(settings, directory.path, leader)
            if resume:
                run = _resume_run(settings, context, opened)
            else:
                run = opened.enter_context(_open_run(settings, context, None, new_run_id()))
            opened.enter_context(stop)
            stop.before_exit = view.close
            group.tell_launcher(STARTED)
            if profile is not None:
                from penstock.train.profile import StepProfiler

                out, note = settings.checkpoint.out, listeners.note
                listeners.add(StepProfiler(out, profile, note, leader))
            finished = TrainingLoop(run, listeners, view, stop).run()
            return 0 if finished else stop.exit_code
    finally:
        listeners.close()
        directory.close()


@dataclass(frozen=True, slots=True)
class _Session:
    """What a run has from its start to its end, whichever checkpoint it continues from."""

    directory: OutputDirectory
    listeners: Listeners
    view: View
    group: RankGroup
    leader: RankLeader
    start_up: StartUp


def _check_ranks(settings: Settings, group: RankGroup) -> None:
    """Raise SettingsError if the ranks are not those that the settings ask for."""
    gpus, here = settings.memory.gpus, group.place.local_world
    if gpus != here:
        raise SettingsError("gpus", f"is {gpus}, but this machine has {here} ranks")
    if group.world > 1:
        check_several_ranks(settings)


def _check_shared(settings: Settings, out: Path, leader: RankLeader) -> None:
    """Raise an error unless all ranks have this output directory and these settings."""
    from penstock.engine.rank_agreement import all_or_none

    if leader.ranks.world == 1:
        return
    path = out / f".ranks-{secrets.token_hex(8)}"
    path.touch()
    try:
        leader.check_out(str(path), _plain(settings))
        with all_or_none(leader.ranks):
            pass
    finally:
        path.unlink(missing_ok=True)


def _plain(settings: Settings) -> dict[str, Any]:
    return {name: to_json(value) for name, value in settings.flat().items()}


def _resume_run(settings: Settings, session: _Session, opened: contextlib.ExitStack) -> TrainingRun:
    """Open a run at its newest checkpoint that is not damaged, or from scratch without any."""
    directory, listeners = session.directory, session.listeners
    found = list_checkpoints(directory.path)
    run_id = find_run_id(directory.path, found.whole)
    candidates = find_resumable(directory.path, found)
    if not candidates:
        keep_model(settings, None, listeners.note)
        listeners.note(f"{settings.checkpoint.out} has no checkpoint: training starts from scratch")
        return opened.enter_context(_open_run(settings, session, None, run_id))
    damaged: list[tuple[Checkpoint, Exception]] = []
    for checkpoint in candidates:
        _note_start(checkpoint, found, listeners)
        try:
            point = load_resume_point(checkpoint)
            run = opened.enter_context(_open_run(settings, session, point, run_id))
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
    settings: Settings, session: _Session, resume: ResumePoint | None, run_id: str
) -> Iterator[TrainingRun]:
    """Load the inputs, choose the plan and prepare the engine, which is closed at the end."""
    directory, listeners, view = session.directory, session.listeners, session.view
    if resume is not None:
        resume.check_formats(settings)
        settings = keep_model(settings, resume, listeners.note)
        settings = resume.with_recorded_sizes(settings)
    start_up = session.start_up
    with start_up.phase(IMPORT):
        import transformers.modeling_utils  # noqa: F401  which takes seconds
    with start_up.phase(SURVEY):
        model = load_model(settings, resume.checkpoint.path if resume else None)
    if resume is not None:
        check_tensors(settings, model.inventory, resume)
    try:
        with start_up.phase(DATA):
            settings, data = load_data(settings, model, listeners.note, view.show_work)
    except SourceError as wrong:
        if resume is not None and _is_missing(wrong.source):
            flag = "--data" if wrong.source in settings.data.data else "--eval-data"
            wrong.add_note(f"the run's data is missing; copy it, or pass {flag} NEW_PATH")
        raise
    batches = _open_batches(settings, data, resume)
    rate = LearningRateSchedule.of(
        settings, batches.steps, from_zero=resume is not None and resume.warmup_from_zero
    )
    if resume is not None and batches.step >= batches.steps:
        listeners.note(_describe_finished(settings, batches.step, batches.steps))
    if session.group.world > 1:
        listeners.note(describe_ranks(session.group))
    machines = session.group.place.machines
    with start_up.phase(PLAN):
        choice, remarks = choose_plan(settings, model, batches.steps, resume, machines)
    _report_plan(choice, batches.steps, listeners, view)
    for remark in (*remarks, *_describe_short_run(settings, batches.steps)):
        listeners.note(remark)
    changes: list[str] = []
    engine = _prepare_engine(settings, model, choice, resume, session, changes)
    try:
        if engine.plan_change:
            listeners.note(engine.plan_change)
        if not engine.self_checked:
            listeners.note(NOT_SELF_CHECKED)
        if resume is not None:
            changes += resume.differences(settings, steps=batches.steps)
            _report_differences(changes, listeners)
        leader = session.leader
        saver = CheckpointSaver(engine, settings, directory, listeners.note, run_id, leader)
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
        resumed = resume is not None
        yield TrainingRun(settings, engine, data, batches, saver, rate, resumed, leader)
    finally:
        engine.close()


def _prepare_engine(
    settings: Settings,
    model: ModelSource,
    choice: PlanChoice,
    resume: ResumePoint | None,
    session: _Session,
    changes: list[str],
) -> Engine:
    """Prepare the engine. On a resume, add what differs from the checkpoint to `changes`.

    The other ranks make the same calls (`follower.prepare_on_rank`).
    """
    from penstock.engine.prepare import prepare
    from penstock.engine.rank_agreement import all_or_none

    group, view = session.group, session.view
    checkpoint = None if resume is None else str(resume.checkpoint.path)
    session.leader.prepare(_plain(settings), checkpoint)
    with all_or_none(group.transport):
        pass  # the others load the model's config, as this rank has done
    arguments = prepare_arguments(settings, resumed=resume is not None)
    with explain_host_out_of_memory(), named_by(settings.memory.plan or "", PlanError):
        engine = prepare(
            model.source, plan=choice, settings=settings, progress=view.show_work,
            ranks=group.transport, device=group.device, start_up=session.start_up, **arguments,
        )  # fmt: skip
        try:
            with all_or_none(group.transport):
                if resume is not None:
                    view.show_work(0, 0, "loading weights")
                    with session.start_up.phase(WEIGHTS):
                        engine.read(resume.checkpoint.path, on_difference=changes.extend)
        except BaseException:
            engine.close()
            raise
    return engine


def describe_ranks(group: RankGroup) -> str:
    """Say which processes train together."""
    place = group.place
    where = f" on {place.machines} machines" if place.machines > 1 else ""
    if group.device == "cpu":
        return (
            f"note: {place.world} ranks compute{where} on CPUs: there is no GPU that torch can use"
        )
    return f"{place.world} ranks compute{where}, each on a GPU"


def _is_missing(source: str) -> bool:
    """Return whether a source of data, perhaps with a split (`folder:train`), does not exist."""
    return not any(Path(name).exists() for name in (source, source.rpartition(":")[0]) if name)


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


def _describe_finished(settings: Settings, done: int, steps: int) -> str:
    """Say that a resumed run has nothing left to do, and how to train longer."""
    out, epochs = settings.checkpoint.out, settings.schedule.epochs or 1
    given = settings.schedule.steps is not None
    noun = "step" if done == 1 else "steps"
    # Both numbers count from the beginning of the run.
    more = f"--steps {2 * done}" if given else f"--epochs {math.floor(epochs * done / steps) + 1}"
    fewer = f", which is more than the {steps} of these settings" if done > steps else ""
    return (
        f"note: the run in {out} is finished after {done} {noun}{fewer}. To train longer, pass a "
        f"larger number of steps or epochs, counted from its beginning, for example --resume {more}"
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
