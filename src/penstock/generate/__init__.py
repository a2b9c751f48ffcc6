"""Text generation with continuous batching over the KV cache.

`Generator` runs requests over a `penstock.kv.VirtualCache`: they join and leave at every step.
"""

from penstock.generate.generator import Counts, Generator
from penstock.generate.requests import GenerationError, Piece, Request

__all__ = ["Generator", "Request", "Piece", "Counts", "GenerationError"]
