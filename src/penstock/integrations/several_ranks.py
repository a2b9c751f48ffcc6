"""A trainer in several processes, each of them a rank of one engine.

`torchrun` starts the script once for each rank. Every process reads the same whole batches, and the
engine deals their micro-batches to the ranks, so that N processes compute what one process does
with N times the batch size. transformers and accelerate would give each process a part of the data
instead, and average what the processes computed.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list

from penstock.distributed.rank_group import RankGroup, open_rank_group, single_rank
from penstock.engine.transport import Transport
from penstock.errors import BatchError, EngineError, SettingsError
from penstock.rank_place import RankPlace
from penstock.train.follower import check_shared

_CALL = struct.Struct("<48s16s")
"""What a rank is about to do, and a digest of the batch that it does it with."""

APART = (
    "rank {rank} {theirs}, and rank {own_rank} {own}. All ranks must make the same calls: do not "
    "train, evaluate or save only where is_world_process_zero is True"
)

OTHER_BATCH = (
    "ranks 0 and {rank} have different batches. Every rank must read the same data in the same "
    "order, and the engine distributes it: do not shard the dataset, and let collators and "
    "transforms draw random numbers only from seeds that are equal on all ranks"
)


def check_launch(args: Any) -> None:
    """Raise SettingsError if this process is a rank in a way that a trainer cannot follow."""
    place = RankPlace.of()
    world = 1 if place is None else place.world
    if world != args.world_size:
        advice = "set use_cpu=True to train on CPUs" if args.world_size == 1 else "use torchrun"
        raise SettingsError(
            "world_size",
            f"is {args.world_size} for transformers, but the launcher has started {world} "
            f"processes; {advice}",
        )
    if args.world_size == 1:
        return
    config = getattr(args, "accelerator_config", None)
    if getattr(config, "split_batches", False):
        raise SettingsError(
            "split_batches",
            "divides each batch by the number of processes; leave it out, and set "
            "per_device_train_batch_size to the size for one process",
        )
    if str(getattr(args, "train_sampling_strategy", "")) == "batch_rebalance":
        raise SettingsError(
            "train_sampling_strategy",
            "is batch_rebalance, which gives each process a part of the data, but every rank "
            "needs all of it; use another strategy",
        )
    if place is not None and place.machines > 1 and args.save_on_each_node:
        raise SettingsError(
            "save_on_each_node",
            "is True, but all machines write one checkpoint together: leave it out, and use an "
            "output_dir on a file system that all of them mount",
        )


def open_group(args: Any) -> RankGroup:
    """Connect this process with the other ranks of a trainer. All of them call this."""
    if args.world_size == 1:
        return single_rank()
    place = RankPlace.of()
    assert place is not None
    return open_rank_group(place, on_cpu=args.device.type == "cpu")


def share_choice(args: Any, choice: Any) -> Any:
    """Return what rank 0 passes as `choice`, on all ranks, before they have a group."""
    if args.world_size == 1:
        return choice
    return broadcast_object_list([choice])[0]


def check_shared_output(args: Any) -> None:
    """Raise OutNotSharedError unless all ranks have the output directory of rank 0."""
    if args.world_size == 1:
        return
    path = Path(args.output_dir).absolute() / f".ranks-{secrets.token_hex(8)}"
    if args.process_index == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    try:
        check_shared(share_choice(args, path), args.process_index)
        PartialState().wait_for_everyone()
    finally:
        path.unlink(missing_ok=True)


def check_together(
    ranks: Transport, call: str, batch: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Raise an error unless all ranks are about to make the same call, with the same batch.

    `call` says in words what this rank does. Without this check, a callback that saves the model
    on one rank only would make the ranks wait for each other in different places.
    """
    if ranks.world == 1:
        return
    messages = ranks.meet(_CALL.pack(call.encode(), _digest(batch or {})))
    calls, digests = zip(*map(_CALL.unpack, messages), strict=True)
    for rank, other in enumerate(calls):
        if other != calls[ranks.rank]:
            theirs = other.rstrip(b"\0").decode()
            problem = APART.format(rank=rank, theirs=theirs, own_rank=ranks.rank, own=call)
            raise EngineError(problem)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise BatchError(OTHER_BATCH.format(rank=rank))


def _digest(batch: Mapping[str, torch.Tensor]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(batch.items()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.cpu().contiguous().numpy().tobytes())
    return found.digest()


class WholeBatchAccelerator(Accelerator):  # type: ignore[misc]
    """accelerate's Accelerator for ranks that all read whole batches.

    Data loaders are prepared as in a single process, and what the ranks have computed is the same
    on all of them, so there is nothing to gather.
    """

    _prepares_data = False

    @property
    def num_processes(self) -> int:
        return 1 if self._prepares_data else int(super().num_processes)

    @property
    def process_index(self) -> int:
        return 0 if self._prepares_data else int(super().process_index)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a data loader as in a single process."""
        start = data_loader.worker_init_fn
        if isinstance(start, functools.partial) and "rank" in start.keywords:
            # Trainer seeds the workers of each process differently.
            data_loader.worker_init_fn = functools.partial(start, rank=0)
        self._prepares_data = True
        try:
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        finally:
            self._prepares_data = False

    def gather(self, tensor: Any) -> Any:
        """Return the tensors: those of all ranks are equal."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the data, less what the last batch has more than the dataset."""
        return super().gather_for_metrics(input_data)

    def pad_across_processes(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """Return the tensors: those of all ranks have equal sizes."""
        return tensor


@contextmanager
def batch_of_all_ranks(args: Any) -> Iterator[None]:
    """Multiply the batch sizes in the arguments by the number of ranks, inside the block."""
    names = ("per_device_train_batch_size", "per_device_eval_batch_size")
    before = {name: getattr(args, name) for name in names}
    for name, size in before.items():
        object.__setattr__(args, name, size * args.world_size)
    try:
        yield
    finally:
        for name, size in before.items():
            object.__setattr__(args, name, size)


@contextmanager
def as_one_process(args: Any) -> Iterator[None]:
    """Let Trainer do what it does in a single process, inside the block."""
    before = args.distributed_state
    args.distributed_state = None
    try:
        yield
    finally:
        args.distributed_state = before
