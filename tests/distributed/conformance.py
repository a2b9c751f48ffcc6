"""What every transport must do; every rank calls `check_transport`."""

from __future__ import annotations

import torch

from penstock.engine.transport import Transport


def check_transport(ranks: Transport, device: str = "cpu") -> None:
    """Assert that a transport moves the right bytes. All ranks must call this.

    Weights and gradients are on `device`; what is broadcast is in host memory.
    """
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        check_gather(ranks, dtype, device)
        for senders in range(1, ranks.world + 1):
            check_exchange(ranks, dtype, senders, device)
        for source in range(ranks.world):
            values = torch.full((3,), ranks.rank + 1).to(dtype)
            ranks.broadcast(values, source)
            assert values.tolist() == [source + 1] * 3
    messages = ranks.meet(bytes([ranks.rank, 7]))
    assert list(messages) == [bytes([rank, 7]) for rank in range(ranks.world)]
    assert list(ranks.meet(b"")) == [b""] * ranks.world


def check_gather(ranks: Transport, dtype: torch.dtype, device: str) -> None:
    shards = torch.zeros(ranks.world * 5).to(device, dtype)
    shards.view(ranks.world, -1)[ranks.rank] = ranks.rank + 1

    ranks.gather(shards)

    assert shards.tolist() == [rank + 1 for rank in range(ranks.world) for _ in range(5)]


def check_exchange(ranks: Transport, dtype: torch.dtype, senders: int, device: str) -> None:
    """Rank r sends 10 r + o to rank o. What those that do not send have in their buffer is lost."""
    parts = torch.tensor([10 * ranks.rank + owner for owner in range(ranks.world)]).to(
        device, dtype
    )
    into = torch.full((2 * ranks.world,), 99).to(device, dtype)

    ranks.exchange(parts.repeat_interleave(2), into, senders)

    wanted = [10 * rank + ranks.rank for rank in range(senders) for _ in range(2)]
    assert into.tolist()[: 2 * senders] == wanted
