"""The ranks of one run: which of them this process is, and its connection to the others.

`torchrun` and `penstock train --gpus N` start one process per rank and describe it in environment
variables. `open_rank_group` reads them and connects the processes: this is the only place where a
process group is created and a transport is chosen. A script may have initialized torch.distributed
already; Penstock's group is then one of several, and closing it leaves the others alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from penstock.engine.transport import SingleRank, Transport
from penstock.errors import EngineError, PeerLostError
from penstock.rank_place import LAUNCH, LOST, REPORTED, RankPlace

if TYPE_CHECKING:
    from penstock.distributed.peer_watch import PeerWatch

TIMEOUT = timedelta(days=30)
"""How long a collective call may wait. Rank 0 may tokenize data for hours before the others have
anything to do. A lost rank ends calls by its closed connections, not by this timeout."""

REPORT_SECONDS = 2.0
"""How long a rank that has lost another one waits for the other's own message."""

_OPENED = itertools.count()
"""How many groups this process has opened: a script may open one after another."""

_REPORTED = "reported"
"""Key of the number of messages that ranks of this run have printed."""


class RankGroup:
    """This process among the ranks of a run. Use it as a context manager, or call `close`."""

    def __init__(
        self, place: RankPlace, transport: Transport, device: str | None,
        store: Any = None, watch: PeerWatch | None = None,
    ) -> None:  # fmt: skip
        self.place, self.transport, self.watch = place, transport, watch
        self.device = device
        """Device that this rank computes on, such as `cuda:1` or `cpu`; None to choose it."""
        self._store = store
        """Key-value store of torch.distributed, which outlives a rank that fails."""
        self._launch = os.environ.get(LAUNCH)

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world(self) -> int:
        return self.place.world

    @property
    def talks(self) -> bool:
        """Whether this rank is the one that prints, and that writes all files but shards."""
        return self.rank == 0

    @property
    def launched(self) -> bool:
        """Whether Penstock's own launcher has started this process."""
        return self._launch is not None

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Let another rank take its time before the collective call in the block."""
        if self.watch is None:
            yield
            return
        self.watch.idle = True
        try:
            yield
        finally:
            self.watch.idle = False

    def tell_launcher(self, name: str, text: str = "") -> None:
        """Leave a message for Penstock's launcher, if that has started this process."""
        if self._launch is not None:
            with contextlib.suppress(OSError):  # the launcher may be gone
                Path(self._launch, name).write_text(text)

    def claim_report(self, error: BaseException) -> bool:
        """Return whether this rank should print its error: one message is enough for all ranks.

        The first rank that fails prints. A rank that only lost another one waits a moment, because
        the other can say more, unless it was killed. Penstock's launcher knows that: it prints the
        message of a rank that was lost if there is none from that rank itself.
        """
        lost = isinstance(error, PeerLostError)
        if lost and self.launched:
            self.tell_launcher(LOST, str(error))
            return False
        claimed = self._store is None or self._claim(REPORT_SECONDS if lost else 0.0)
        if claimed:
            self.tell_launcher(REPORTED)
        return claimed

    def _claim(self, patience: float) -> bool:
        deadline = time.monotonic() + patience
        with contextlib.suppress(RuntimeError):  # the store is gone with the launcher
            while time.monotonic() < deadline:
                if self._store.add(_REPORTED, 0):
                    return False
                time.sleep(0.05)
            return bool(self._store.add(_REPORTED, 1) == 1)
        return True

    def close(self) -> None:
        """Leave the group, after all ranks have come to their end."""
        if self._store is None:
            return
        from penstock.distributed.rank_transport import RankTransport

        self.transport.meet(b"\0")
        self._store = None
        if isinstance(self.transport, RankTransport):
            self.transport.close()
        if self.watch is not None:
            self.watch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.close()
            return
        # After a failure, the others may be anywhere, and never meet this rank.
        if not isinstance(error, SystemExit):
            self.transport.abort(error)
        if self.watch is not None:
            self.watch.close()


def single_rank() -> RankGroup:
    """Return the group of a process that is alone."""
    return RankGroup(RankPlace(), SingleRank(), None)


def open_rank_group(place: RankPlace, *, on_cpu: bool = False) -> RankGroup:
    """Connect this process to the other ranks, and choose its device. All ranks call this.

    With `on_cpu`, it computes on the CPU even if there is a GPU.
    """
    import torch
    import torch.distributed as dist

    device = "cpu"
    if torch.cuda.is_available() and not on_cpu:
        if torch.cuda.device_count() < place.local_world:
            raise EngineError(
                f"there are {place.local_world} ranks on this machine, and each needs a GPU, but "
                f"torch can use {torch.cuda.device_count()}; start fewer ranks"
            )
        device = f"cuda:{place.local_rank}"
        torch.cuda.set_device(place.local_rank)
    if place.world == 1:
        return RankGroup(place, SingleRank(), device)
    added = None
    if dist.is_initialized():
        # The script's own group may have another backend and a timeout of minutes.
        added = dist.new_group(backend="gloo", timeout=TIMEOUT)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    store: Any = _own_part(dist.distributed_c10d._get_default_store())
    watch = _watch_ranks(place, store)
    return RankGroup(place, _open_transport(watch, store, added), device, store, watch)


def _watch_ranks(place: RankPlace, store: Any) -> PeerWatch:
    """Connect this rank to all others, and watch them from now on."""
    from torch._C._distributed_c10d import PrefixStore

    from penstock.distributed.peer_sockets import connect_ranks
    from penstock.distributed.peer_watch import PeerWatch

    return PeerWatch(connect_ranks(PrefixStore("watch", store), place.rank, place.world))


def _open_transport(watch: PeerWatch, store: Any, group: Any) -> Transport:
    """Return the transport of this rank, which follows the plan once there is one."""
    from torch._C._distributed_c10d import PrefixStore

    from penstock.distributed.gloo_ranks import GlooTransport
    from penstock.distributed.rank_transport import RankTransport

    return RankTransport(GlooTransport(watch, group), PrefixStore("data", store))


def _own_part(store: Any) -> Any:
    """Return a part of the store that no other group uses.

    A launcher that restarts its workers keeps its store, with what the lost ones wrote, and a
    script may open several groups. All ranks open equally many.
    """
    from torch._C._distributed_c10d import PrefixStore

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"penstock/{attempt}/{next(_OPENED)}", store)
