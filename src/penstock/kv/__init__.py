"""A KV cache that is contiguous in virtual memory and grows with its sequences.

`VirtualCache` reserves address space once and maps memory as sequences grow. It is a transformers
cache, and the memory of the continuous batching in `penstock.generate`.
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
