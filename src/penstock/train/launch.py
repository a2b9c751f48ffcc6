"""Start one process per GPU on this machine, pass signals on to them, and wait for their end.

Torch's elastic agent starts the processes and ends all of them when one fails. It runs in a thread,
where it handles no signals: on Ctrl-C it would kill the ranks after 30 seconds, while a step and a
save may take longer. The main thread passes signals on instead, and never kills a rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from penstock.errors import SettingsError
from penstock.machine.limits import IMPORTS, host_memory
from penstock.machine.sysfs import System
from penstock.plan.workload import too_few_micro_batches
from penstock.rank_place import CODE, LAUNCH, LOST, REPORTED, STARTED, pid_name
from penstock.settings import Settings, write_yaml
from penstock.train.errors import RanksLostError
from penstock.train.signals import SIGNALS, STOPPED, STOPPING, write_error
from penstock.units import format_bytes

POLL_SECONDS = 0.1


def launch(settings: Settings, flags: list[str]) -> int:
    """Train with one process per GPU, and return the exit code of the run.

    Every process runs `penstock train` with these settings and the additional `flags`. Raises
    RanksLostError if a rank ended and none of them has printed why.
    """
    check_several_ranks(settings)
    _check_gpus(settings.memory.gpus)
    _check_processes(settings, System())
    folder = Path(tempfile.mkdtemp(prefix="penstock-launch-"))
    try:
        config = folder / "settings.yaml"
        write_yaml(settings, config)
        command = ["-m", "penstock", "train", "--config", str(config), *flags]
        if settings.model.trust_remote_code:
            command.append("--trust-remote-code")  # which no file can set for a resumed run
        with _environment(folder), _no_logs():
            return _Launcher(folder, settings.memory.gpus).run(command)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_several_ranks(settings: Settings) -> None:
    """Raise SettingsError for what only a single rank can do."""
    if settings.evaluation.sample_prompts is not None:
        raise SettingsError(
            "sample_prompts",
            "cannot be combined with several GPUs in this version; leave it out, and answer "
            "prompts with `penstock generate` and a checkpoint",
        )


def _check_gpus(wanted: int) -> None:
    """Raise SettingsError if there are GPUs, but fewer than wanted. Without any, CPUs compute."""
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() < wanted:
        number = torch.cuda.device_count()
        raise SettingsError(
            "gpus", f"is {wanted}, but torch can use {number} here; use --gpus {number} or less"
        )


def _check_processes(settings: Settings, system: System) -> None:
    """Raise SettingsError if there cannot be so many ranks, before any of them is started.

    Each rank loads PyTorch, so the ranks of a mistyped number would fill the memory of the machine
    before the first of them finds out that its batch is too small.
    """
    ranks, schedule = settings.memory.gpus, settings.schedule
    size = schedule.micro_batch_size or 1  # which `auto` may choose
    # Without a batch, the first rank chooses one when it has read the data.
    if schedule.batch is not None and -(-schedule.batch // size) < ranks:
        raise SettingsError("batch", too_few_micro_batches(schedule.batch, size, ranks))
    free = host_memory(system).free
    if free < ranks * IMPORTS:
        raise SettingsError(
            "gpus",
            f"is {ranks}: as many processes need {format_bytes(ranks * IMPORTS)} to load PyTorch, "
            f"and {format_bytes(free)} of memory are free; use --gpus {max(1, free // IMPORTS)} or "
            f"less",
        )


@contextlib.contextmanager
def _environment(folder: Path) -> Iterator[None]:
    """Set what the ranks read, which inherit the environment of this process."""
    # All ranks are on this machine. The address of its host name may be none of its own.
    added = {LAUNCH: str(folder), "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _no_logs() -> Iterator[None]:
    """Silence the agent, which logs tracebacks where a rank has printed one message."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


class _Launcher:
    """Runs the ranks of one run."""

    def __init__(self, folder: Path, world: int) -> None:
        self._folder, self._world = folder, world
        self._signals: list[int] = []
        """The signals that this process has received."""
        self._passed_on = [0] * world
        """How many of them each rank has got."""
        self._exit_codes: Mapping[int, int] = {}
        self._problem: BaseException | None = None

    def run(self, command: list[str]) -> int:
        agent = threading.Thread(target=self._run_agent, args=(command,), daemon=True)
        before = {number: signal.signal(number, self._note) for number in self._handled()}
        try:
            agent.start()
            while agent.is_alive():
                self._pass_signals_on()
                agent.join(POLL_SECONDS)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._problem is not None:
            raise self._problem
        return self._exit_code()

    @staticmethod
    def _handled() -> list[int]:
        if threading.current_thread() is not threading.main_thread():
            return []
        # nohup ignores SIGHUP, so that the run survives the terminal.
        return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]

    def _note(self, number: int, _: FrameType | None) -> None:
        if self._signals and number == signal.SIGHUP:
            return  # a closed terminal sends it several times
        if (self._folder / STARTED).exists():
            write_error(STOPPED if self._signals else STOPPING)
        self._signals.append(number)

    def _pass_signals_on(self) -> None:
        """Send each rank the signals that it has not got, as soon as it can receive them."""
        for rank in range(self._world):
            waiting = self._signals[self._passed_on[rank] :]
            if not waiting:
                continue
            with contextlib.suppress(OSError, ValueError):  # not started yet, or ended
                os.kill(int((self._folder / pid_name(rank)).read_text()), waiting[0])
                self._passed_on[rank] += 1

    def _run_agent(self, command: list[str]) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=self._world, max_restarts=0,
            run_id=uuid.uuid4().hex, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
            local_addr="localhost", monitor_interval=POLL_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=str(self._folder)),
        )  # fmt: skip
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as failed:
            failures: dict[int, Any] = failed.failures
            self._exit_codes = {rank: each.exitcode for rank, each in failures.items()}
        except BaseException as problem:
            self._problem = problem

    def _exit_code(self) -> int:
        """Return the exit code of the run, or raise RanksLostError if nobody said why it ended."""
        code = self._read(CODE)
        if code is not None and not self._exit_codes:
            return int(code)
        if self._signals and not (self._folder / REPORTED).exists():
            return 128 + self._signals[-1]
        if not (self._folder / REPORTED).exists():
            raise RanksLostError(self._exit_codes, self._read(LOST) or "")
        return next((code for code in self._exit_codes.values() if code > 0), 1)

    def _read(self, name: str) -> str | None:
        try:
            return (self._folder / name).read_text()
        except OSError:
            return None
