"""Training data: from files to tokens, and from tokens to packed batches (docs/data.md).

```python
tokenizer = load_tokenizer("meta-llama/Llama-3.2-1B-Instruct")
dataset = open_dataset("chats.jsonl", tokenizer)
packed = dataset.pack(4096, overlong="split", seed=0)
batches = packed.batches(32, epochs=2, seed=0)
```
"""

from penstock.data.batches import Batches, Packed
from penstock.data.dataset import Document, TokenDataset, open_dataset
from penstock.data.errors import DataError
from penstock.data.packing import Counts
from penstock.data.pairs import PairDataset, open_pairs
from penstock.data.tokenizer import load_tokenizer
from penstock.settings import Overlong

__all__ = [
    "open_dataset",
    "open_pairs",
    "load_tokenizer",
    "TokenDataset",
    "Document",
    "PairDataset",
    "Packed",
    "Counts",
    "Overlong",
    "Batches",
    "DataError",
]
