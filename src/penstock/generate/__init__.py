"""Text generation with continuous batching over the KV cache.

`Generator` runs requests over a `penstock.kv.VirtualCache`. Requests join and leave the batch at
every step.
"""

from penstock.generate.generator import GenerationCounts, Generator
from penstock.generate.requests import GenerationError, Request, TokenChunk

__all__ = ["Generator", "Request", "TokenChunk", "GenerationCounts", "GenerationError"]
