"""What a rank reports at the end of a step, and the report of all ranks together.

Every rank gets the same reports and joins them in the same way, so all ranks decide the same:
whether the step is skipped, by how much its gradient is clipped, and the loss.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engine.transport import Transport
from penstock.optim.norms import GradStats

_UNITS_NBYTES = 128
"""Bytes of the exact sum of squares. A sum of fp32 squares has 84; the rest leaves room for more
elements than any model has."""

_HEAD = struct.Struct(f"<{_UNITS_NBYTES}sdqqq")
_LOSS = struct.Struct("<qd")


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome of a step, of one rank or of all of them."""

    stats: GradStats
    """Norm and overflow of the gradients. `first_bad` is a block and the number of a tensor."""

    losses: tuple[tuple[int, float], ...]
    """Number and loss sum of each micro-batch, in the order of the batch."""

    @property
    def loss(self) -> float:
        """Sum of the losses, added in the order of the batch."""
        total = 0.0
        for number, (_, loss) in enumerate(self.losses):
            total = total + loss if number else loss
        return total

    def pack(self, most: int) -> bytes:
        """Return the report as bytes, of the same length for every report of `most` losses."""
        finite = self.stats.finite
        units = (self.stats.units if finite else 0).to_bytes(_UNITS_NBYTES, "little")
        block, tensor = self.stats.first_bad or (-1, -1)
        head = _HEAD.pack(units, self.stats.max_abs, block, tensor, len(self.losses))
        losses = b"".join(_LOSS.pack(*each) for each in self.losses)
        return (head + losses).ljust(_HEAD.size + most * _LOSS.size, b"\0")

    @classmethod
    def unpack(cls, message: bytes) -> StepReport:
        """Read what `pack` returned."""
        units, max_abs, block, tensor, count = _HEAD.unpack_from(message)
        bad = (block, tensor) if block >= 0 else None
        stats = GradStats(int.from_bytes(units, "little"), max_abs, bad)
        starts = (_HEAD.size + i * _LOSS.size for i in range(count))
        return cls(stats, tuple(_LOSS.unpack_from(message, at) for at in starts))


def join(reports: Sequence[StepReport]) -> StepReport:
    """Join the reports of all ranks."""
    total = GradStats(0, 0.0, None)
    for report in reports:
        total = total + report.stats
    bad = [r.stats.first_bad for r in reports if r.stats.first_bad is not None]
    # Backward goes from the last block to the first, and one rank names what it meets first.
    first = min(bad, key=lambda each: (-each[0], each[1]), default=None)
    losses = sorted(loss for report in reports for loss in report.losses)
    return StepReport(GradStats(total.units, total.max_abs, first), tuple(losses))


def share(report: StepReport, ranks: Transport, most: int) -> StepReport:
    """Tell all ranks this rank's report, of at most `most` losses, and return that of all."""
    return join([StepReport.unpack(each) for each in ranks.meet(report.pack(most))])
