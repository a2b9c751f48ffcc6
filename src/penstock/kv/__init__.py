"""Generation with a cache that is contiguous and grows. Room: hold.

`VirtualCache` reserves address space once and maps memory as sequences grow; it is a transformers
cache and the memory of continuous batching. `Generator` runs requests over it.
"""

from penstock.kv.batch import Batch
from penstock.kv.cache import VirtualCache
from penstock.kv.errors import CacheFull, ContextError, KvError, KvWarning, NoSlot
from penstock.kv.generator import Counts, Generator
from penstock.kv.pool import PagePool
from penstock.kv.requests import GenerationError, Piece, Request
from penstock.kv.slots import Sequence
from penstock.kv.stats import Stats

__all__ = [
    "Generator",
    "Request",
    "Piece",
    "Counts",
    "GenerationError",
    "VirtualCache",
    "Sequence",
    "Batch",
    "Stats",
    "PagePool",
    "KvError",
    "KvWarning",
    "CacheFull",
    "NoSlot",
    "ContextError",
]
