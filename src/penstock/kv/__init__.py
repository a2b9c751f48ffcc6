"""Generation with a cache that is contiguous and grows. Room: hold.

`VirtualCache` reserves address space once and maps memory as sequences grow; it is a transformers
cache and the memory of continuous batching.
"""

from penstock.kv.cache import Batch, VirtualCache
from penstock.kv.errors import CacheFull, ContextError, KvError, KvWarning, NoSlot
from penstock.kv.page_pool import PagePool
from penstock.kv.sequences import Stats
from penstock.kv.slots import Sequence

__all__ = [
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
