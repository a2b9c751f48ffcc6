"""What every rank but the first does in a run: follow the commands of rank 0."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.errors import CheckpointError
from penstock.errors import BatchError, NonFiniteLossError, SettingsError
from penstock.records import to_json
from penstock.settings import Settings
from penstock.train.errors import OutNotSharedError, explain_host_out_of_memory
from penstock.train.inputs import load_model, prepare_arguments
from penstock.train.rank_commands import Command, RankFollower, read_batch, read_fields
from penstock.train.signals import StopRequest

if TYPE_CHECKING:
    from penstock.distributed.rank_group import RankGroup
    from penstock.engine.engine import Engine
    from penstock.train.profile import RankProfiler

SHARED_SECONDS = 10.0
"""How long a rank looks for a file of rank 0. Network file systems show new files after seconds."""


def follow(settings: Settings, group: RankGroup, stop: StopRequest) -> int:
    """Do what rank 0 says until the end of the run, and return the exit code."""
    with ExitStack() as opened:
        return _Follower(settings, group, stop, opened).run()


class _Follower:
    def __init__(
        self, settings: Settings, group: RankGroup, stop: StopRequest, opened: ExitStack
    ) -> None:
        self._settings, self._group, self._stop = settings, group, stop
        self._commands = RankFollower(group.transport, stop)
        self._opened = opened
        self._engine: Engine | None = None
        self._profiler: RankProfiler | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "rank 0 has prepared no engine"
        return self._engine

    def run(self) -> int:
        while True:
            with self._group.idle():  # rank 0 may tokenize for hours
                command, data = self._commands.receive()
            match command:
                case Command.END:
                    return int(read_fields(data)["code"])
                case Command.CHECK_OUT:
                    self._check_out(read_fields(data))
                case Command.PREPARE:
                    self._prepare(read_fields(data))
                case Command.STEP:
                    self._step(data)
                case Command.EVALUATE:
                    self._evaluate()
                case Command.WRITE:
                    self._write(read_fields(data))
                case Command.PROFILE:
                    self._profile(read_fields(data))

    def _check_out(self, fields: dict[str, Any]) -> None:
        from penstock.engine.rank_agreement import all_or_none

        with all_or_none(self._group.transport):
            check_shared(Path(fields["path"]), self._group.rank)
            check_settings(self._settings, fields["settings"], self._group.rank)

    def _prepare(self, fields: dict[str, Any]) -> None:
        """Prepare the engine, or leave it to rank 0 what follows if a rank could not."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        settings = Settings.of(fields["settings"])
        checkpoint = fields["checkpoint"] and Path(fields["checkpoint"])
        try:
            self._engine = prepare_on_rank(settings, checkpoint, self._group)
        except CheckpointError:
            return  # rank 0 may continue from an older checkpoint
        self._opened.callback(self._engine.close)
        if not self._stop.entered:
            # From now on, a signal ends the run after a step. Until then, it ends the process.
            self._opened.enter_context(self._stop)

    def _step(self, data: bytes) -> None:
        batch, fields = read_batch(data)
        for group, rate in zip(self.engine.optimizer.param_groups, fields["rates"], strict=True):
            group["lr"] = rate
        # Rank 0 raises the same errors, and saves a checkpoint first.
        with suppress(BatchError, NonFiniteLossError):
            self.engine.step(batch)
        if self._profiler is not None:
            self._profiler.count_step()

    def _evaluate(self) -> None:
        # As above, or rank 0 has stopped the evaluation before its first batch.
        with suppress(BatchError):
            self.engine.evaluate(self._eval_batches())

    def _eval_batches(self) -> Iterator[Any]:
        while True:
            command, data = self._commands.receive()
            if command is Command.BATCH:
                yield read_batch(data)[0]
            elif command is Command.LAST_BATCH:
                return

    def _profile(self, fields: dict[str, Any]) -> None:
        from penstock.train.profile import RankProfiler

        place = self._group.place
        self._profiler = RankProfiler(
            Path(fields["folder"], f"rank-{place.rank}"), fields["steps"],
            # Another machine has another clock.
            fields["origin"] if place.machine == 0 else None,
        )  # fmt: skip
        self._opened.callback(self._profiler.close)

    def _write(self, fields: dict[str, Any]) -> None:
        # Rank 0 has the same error, and decides what follows.
        with suppress(CheckpointError):
            self.engine.write(fields["folder"], optimizer=fields["optimizer"])


def prepare_on_rank(settings: Settings, checkpoint: Path | None, group: RankGroup) -> Engine:
    """Prepare the engine of this rank, at a checkpoint if the run is resumed."""
    from penstock.engine.prepare import prepare
    from penstock.engine.rank_agreement import all_or_none

    ranks = group.transport
    with all_or_none(ranks):
        model = load_model(settings, checkpoint)
    arguments = prepare_arguments(settings, resumed=checkpoint is not None)
    with explain_host_out_of_memory():
        engine = prepare(
            model.source, settings=settings, ranks=ranks, device=group.device, **arguments
        )
    try:
        with all_or_none(ranks):
            if checkpoint is not None:
                engine.read(checkpoint, on_difference=lambda _: None)  # rank 0 reports them
    except BaseException:
        engine.close()
        raise
    return engine


def check_shared(path: Path, rank: int, seconds: float = SHARED_SECONDS) -> None:
    """Raise OutNotSharedError unless this rank sees a file that rank 0 has just written."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise OutNotSharedError(str(path.parent), rank)
        time.sleep(0.1)


def check_settings(own: Settings, settings: dict[str, Any], rank: int) -> None:
    """Raise SettingsError if this rank was started with other settings than rank 0."""
    for name, value in own.flat().items():
        if to_json(value) != settings[name]:
            raise SettingsError(
                name,
                f"is {to_json(value)} on rank {rank} and {settings[name]} on rank 0; start all "
                f"ranks with the same arguments",
            )
