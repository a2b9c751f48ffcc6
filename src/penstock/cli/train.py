"""`penstock train`: fine-tune a model."""

from __future__ import annotations

import contextlib
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.flags import (
    REQUIRED,
    MissingSettingError,
    given_settings,
    keyword,
    set_parameters,
    settings_parameters,
    usage_error,
)
from penstock.cli.output import EXIT_INTERRUPTED, print_errors
from penstock.cli.rank import INTERRUPTED, begin_rank, end_process, run_rank
from penstock.errors import SettingsError
from penstock.machine.limits import check_import_memory
from penstock.machine.sysfs import System
from penstock.rank_place import RankPlace
from penstock.settings import Layer, Settings, merge_layers, read_yaml

if TYPE_CHECKING:
    from penstock.distributed.rank_group import RankGroup


def train_command(**flags: Any) -> None:
    """Fine-tune a model within a memory budget per tier.

    Press Ctrl-C once to save a checkpoint and stop; continue later with --resume.
    """
    from penstock.train.signals import interrupt_on_signals

    place = RankPlace.of()
    try:
        # A rank may wait for others in a call that Python cannot interrupt.
        with interrupt_on_signals() if place is None else contextlib.nullcontext():
            _train(flags, place)
    except KeyboardInterrupt as interrupted:
        if place is None:
            with contextlib.suppress(OSError):  # a closed terminal
                print_errors(INTERRUPTED)
            code = getattr(interrupted, "exit_code", EXIT_INTERRUPTED)
            raise typer.Exit(code) from None
        end_process(EXIT_INTERRUPTED)  # one rank says so, if they are connected already


def _train(flags: dict[str, Any], place: RankPlace | None) -> None:
    """Train in this process, which may be a rank, or start the ranks."""
    if place is not None:
        begin_rank(place)
    if "torch" not in sys.modules:  # the next import loads it
        check_import_memory(System())
    from penstock.train.progress import SilentView
    from penstock.train.session import pick_view, train

    resume, as_json, profile = (flags.pop(name) for name in ("resume", "as_json", "profile"))
    settings = _merge_settings(flags, resume=resume, place=place)
    if place is None and settings.memory.gpus > 1:
        from penstock.train.launch import launch

        raise typer.Exit(launch(settings, _rank_flags(resume, as_json, profile)))

    def work(group: RankGroup | None) -> int:
        view = pick_view(as_json) if group is None or group.talks else SilentView()
        return train(
            settings, resume=resume, view=view, as_json=as_json, profile=profile, group=group
        )

    if place is not None:
        raise typer.Exit(run_rank(place, work))
    raise typer.Exit(work(None))


def _rank_flags(resume: bool, as_json: bool, profile: int | None) -> list[str]:
    """Return the flags of this command that are not settings, for the processes of all ranks."""
    flags = ["--resume"] if resume else []
    flags += ["--json"] if as_json else []
    return [*flags, "--profile", str(profile)] if profile is not None else flags


def _merge_settings(flags: dict[str, Any], *, resume: bool, place: RankPlace | None) -> Settings:
    """Merge, weakest first: defaults, run.yaml of the resumed run, --config, the command line."""
    config = flags.pop("config")
    try:
        given = given_settings(flags)
    except SettingsError as wrong:
        raise usage_error(wrong) from None
    try:
        layers: list[tuple[str, Layer]] = [("", given)]
        if config is not None:
            layers.insert(0, (str(config), read_yaml(config)))
        if place is not None:
            layers.append(("", _ranks_layer(layers, place)))
        if resume and (out := _find_out(layers)) is not None:
            layers = [*_saved_layers(out), *layers]
            _check_trust(layers, out)
        _check_required(layers)
        settings = merge_layers(layers)
        if not settings.data.data:
            source = next(name for name, layer in reversed(layers) if "data" in layer)
            raise SettingsError("data", "must name at least one file", where=source)
        return _with_plan(settings, layers)
    except SettingsError as wrong:
        # A usage error (exit code 2) if the value came from the command line.
        if wrong.field in given or (not wrong.where and config is None and not resume):
            raise usage_error(wrong) from None
        raise


def _ranks_layer(layers: list[tuple[str, Layer]], place: RankPlace) -> Layer:
    """Return the number of ranks on this machine, unless the user wants another than there are.

    The run.yaml of a resumed run may have another one.
    """
    here = place.local_world
    for source, layer in layers:
        if layer.get("gpus", here) != here:
            raise SettingsError(
                "gpus",
                f"is {layer['gpus']}, but the launcher has started {here} processes on this "
                f"machine; leave --gpus out under torchrun, or start as many processes",
                where=source,
            )
    return {"gpus": here}


def _with_plan(settings: Settings, layers: list[tuple[str, Layer]]) -> Settings:
    """Let the plan file, if there is one, set what no layer sets."""
    if settings.memory.plan is None:
        return settings
    from penstock.train.plan_choice import plan_layer

    path = settings.memory.plan
    return merge_layers([(path, plan_layer(path)), *layers])


def _find_out(layers: list[tuple[str, Layer]]) -> Path | None:
    """Find the output directory, which the strongest layer names."""
    out = next((layer["out"] for _, layer in reversed(layers) if layer.get("out")), None)
    return Path(str(out)) if out is not None else None


def _saved_layers(out: Path) -> tuple[tuple[str, Layer], ...]:
    """Return the settings of the resumed run, and say so if its run.yaml is damaged."""
    from penstock.train.saved_settings import read_saved_settings

    saved = read_saved_settings(out)
    if saved.note:
        typer.echo(saved.note, err=True)
    return saved.layers


def _check_trust(layers: list[tuple[str, Layer]], out: Path) -> None:
    """Raise SettingsError if only a file in the output directory allows code from there to run.

    A resume imports the model's code from the checkpoint, which may come from somebody else: it
    must not decide by itself that it is trusted.
    """
    name = "trust_remote_code"
    source, layer = next((pair for pair in reversed(layers) if name in pair[1]), ("", {}))
    # The command line has no source, and a file of --config may be the user's own.
    if source and layer[name] and Path(source).resolve().is_relative_to(out.resolve()):
        raise SettingsError(
            name,
            f"is not taken from the directory of a run; to run the model's code in {out}, pass "
            f"--trust-remote-code on the command line again",
            where=source,
        )


def _check_required(layers: list[tuple[str, Layer]]) -> None:
    names: set[str] = set().union(*(layer for _, layer in layers))
    for name in REQUIRED:
        if name not in names:
            raise MissingSettingError(name)


def _parameters() -> list[inspect.Parameter]:
    profile = typer.Option(
        "--profile", min=1, help="Record the first N steps in the directory OUT/profile."
    )
    config = typer.Option(
        help="YAML file of settings, named like the flags. The command line overrides it."
    )
    resume = typer.Option(
        "--resume",
        help="Continue from the newest checkpoint in --out, with the bits of an uninterrupted run "
        "on the same GPU model and software; budgets may change.",
    )
    as_json = typer.Option("--json", help="Print one JSON object per line and nothing else.")
    return [
        *settings_parameters(),
        keyword("profile", Annotated[int | None, profile], None),
        keyword("config", Annotated[Path | None, config], None),
        keyword("resume", Annotated[bool, resume], False),
        keyword("as_json", Annotated[bool, as_json], False),
    ]


set_parameters(train_command, _parameters())
