"""Errors of the KV cache that a user can act on.

Like those of `penstock.errors`, they say what failed, how much it needed, how much there was and
what to do next. The numbers are attributes, too.
"""

from __future__ import annotations

from penstock.errors import PenstockError
from penstock.units import format_bytes


class KvError(PenstockError):
    """Base class of the cache's errors. After most of them the cache can still be used."""


class KvWarning(UserWarning):
    """An optional feature is not available, and generation continues without it."""


class CacheFull(KvError, MemoryError):  # noqa: N818  # a public name; a state, not a mistake
    """The budget has too few pages left. Nothing was allocated."""

    def __init__(self, *, what: str, wanted: int, free: int, budget: int, page: int) -> None:
        self.wanted, self.free, self.budget, self.page_nbytes = wanted, free, budget, page
        super().__init__(
            f"{what} needs {wanted} more pages of {format_bytes(page)} "
            f"({format_bytes(wanted * page)}), but only {free} of the budget's {budget} pages are "
            f"available. Finish or preempt a sequence, or give the cache a larger budget"
        )


class NoSlot(KvError):  # noqa: N818  # a public name
    """Every slot holds a live sequence."""

    def __init__(self, *, slots: int) -> None:
        self.slots = slots
        super().__init__(
            f"all {slots} slots hold a live sequence. Finish or preempt one, or create the cache "
            f"with a larger max_batch (slots cost address space, not memory)"
        )


class ContextError(KvError, ValueError):
    """A sequence would outgrow its slot."""

    def __init__(self, *, length: int, new: int, limit: int) -> None:
        self.length, self.new, self.limit = length, new, limit
        super().__init__(
            f"a sequence of {length} tokens cannot grow by {new}, because the cache holds at most "
            f"{limit} tokens per sequence. Create it with max_context={length + new} or more "
            f"(that costs address space, not memory)"
        )


class BudgetError(KvError, ValueError):
    """The budget is too small for one page per sequence."""

    def __init__(self, *, budget: int, sequences: int, page: int) -> None:
        self.budget, self.sequences, self.page_nbytes = budget, sequences, page
        self.wanted = sequences * page
        super().__init__(
            f"a budget of {format_bytes(budget)} is too small for one page of {format_bytes(page)} "
            f"for each of {sequences} sequences. Raise it to {format_bytes(self.wanted)} or more, "
            f"or lower max_batch to {budget // page}"
        )


class SequenceError(KvError, ValueError):
    """The sequence is finished, in host memory, or belongs to another cache."""


class BatchError(KvError, ValueError):
    """The rows passed to the cache do not match what it was prepared for."""


class ModelError(KvError, ValueError):
    """The model's cache is not keys and values of one size, or not those of this cache."""


class SpaceError(KvError):
    """The operating system or the GPU driver refused a page or an address range."""

    def __init__(self, *, call: str, reason: str, advice: str) -> None:
        self.call, self.reason = call, reason
        super().__init__(f"{call}: {reason}; {advice}")


class GrowthError(KvError):
    """Mapping a page ahead of need failed in the background. The page is mapped when needed."""


class BrokenCacheError(KvError):
    """A row was left without its pages, or the cache is closed; only `close` is possible."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class name if there is none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
