"""What can go wrong with a cache that a user can mend. Room: names.

Like penstock.errors: which thing, how much it wanted, how much there was, what to do next; the
numbers are attributes too.
"""

from __future__ import annotations

from penstock.errors import PenstockError
from penstock.units import format_bytes


class KvError(PenstockError):
    """The cache could not do what was asked. Every error here is one; the cache goes on."""


class KvWarning(UserWarning):
    """Something is missing, and generation goes on without it."""


class CacheFull(KvError, MemoryError):  # noqa: N818  # the seam's name; a state, not a mistake
    """The budget has too few pages left. Nothing was taken."""

    def __init__(self, *, what: str, wanted: int, free: int, budget: int, page: int) -> None:
        self.wanted, self.free, self.budget, self.page_nbytes = wanted, free, budget, page
        super().__init__(
            f"{what} needs {wanted} more pages of {format_bytes(page)} "
            f"({format_bytes(wanted * page)}); {free} of the budget's {budget} can be had. Finish "
            f"or preempt a sequence, or give the cache a larger budget"
        )


class NoSlot(KvError):  # noqa: N818
    """Every slot holds a live sequence."""

    def __init__(self, *, slots: int) -> None:
        self.slots = slots
        super().__init__(
            f"all {slots} slots hold a live sequence; finish or preempt one, or make the cache "
            f"with a larger max_batch (slots cost address space, not memory)"
        )


class ContextError(KvError, ValueError):
    """A sequence would grow beyond its slot."""

    def __init__(self, *, length: int, new: int, limit: int) -> None:
        self.length, self.new, self.limit = length, new, limit
        super().__init__(
            f"a sequence of {length} tokens cannot grow by {new}: the cache holds up to {limit} "
            f"each. Make it with max_context={length + new} or more (address space, not memory)"
        )


class BudgetError(KvError, ValueError):
    """A budget that cannot hold even one page per sequence."""

    def __init__(self, *, budget: int, sequences: int, page: int) -> None:
        self.budget, self.sequences, self.page_nbytes = budget, sequences, page
        self.wanted = sequences * page
        super().__init__(
            f"a budget of {format_bytes(budget)} is less than one page of {format_bytes(page)} "
            f"for each of {sequences} sequences; give at least {format_bytes(self.wanted)} or "
            f"lower max_batch to {budget // page}"
        )


class SequenceError(KvError, ValueError):
    """A sequence that is finished, away or not of this cache was given."""


class BatchError(KvError, ValueError):
    """Rows do not fit what the cache holds."""


class ModelError(KvError, ValueError):
    """A model whose cache has another shape than keys and values of one size."""


class SpaceError(KvError):
    """The operating system or the GPU's driver refused a page or an address."""

    def __init__(self, *, call: str, reason: str, advice: str) -> None:
        self.call, self.reason = call, reason
        super().__init__(f"{call}: {reason}; {advice}")


class GrowthError(KvError):
    """Growing ahead of need failed in the background. What it wanted is asked for again."""


class BrokenCacheError(KvError):
    """A page table was left half written; only `close` is possible."""


def first_line(error: Exception) -> str:
    """What it says, in short; its name if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
