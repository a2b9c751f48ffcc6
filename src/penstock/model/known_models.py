"""Sizes of well-known models, so that `penstock fit` can plan for them without a download.

The figures are those of the published `config.json` files. Every one of these models is a plain
decoder: embedding, layers of attention and a gated MLP, norm, head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.model.inventory import Block, Inventory, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """The sizes of a model."""

    hidden: int
    """Width of the hidden states."""
    mlp: int
    """Width of the MLP."""
    layers: int
    query: int
    """Number of query heads times their size."""
    key: int
    """Number of key heads times their size; values have the same width."""
    vocabulary: int
    context: int
    """Number of positions."""
    tied: bool = False
    """Whether the head is the embedding."""
    norms: int = 2
    """Number of norms of the hidden width in each layer."""
    head_norm: tuple[int, int] = (0, 0)
    """Widths of the norms of queries and keys; 0 for none."""
    bias: bool = False
    """Whether queries, keys and values have a bias."""

    def inventory(self, name: str) -> Inventory:
        """Return the model's blocks and tensors."""
        table = TensorSpec(name="model.embed_tokens.weight", shape=(self.vocabulary, self.hidden))
        norm = TensorSpec(name="model.norm.weight", shape=(self.hidden,))
        own = TensorSpec(name="lm_head.weight", shape=(self.vocabulary, self.hidden))
        head = Block(
            name="lm_head",
            kind="head",
            tensors=(norm,) if self.tied else (norm, own),
            borrows=(table.name,) if self.tied else (),
            matmul_elements=self.vocabulary * self.hidden,
        )
        return Inventory(
            model=name,
            architecture="",
            hidden=self.hidden,
            vocabulary=self.vocabulary,
            max_context=self.context,
            blocks=(
                Block(name="model.embed_tokens", kind="embedding", tensors=(table,)),
                *(self._layer(f"model.layers.{i}") for i in range(self.layers)),
                head,
            ),
        )

    def _layer(self, path: str) -> Block:
        matrices = tuple(
            TensorSpec(name=f"{path}.{name}.weight", shape=shape)
            for name, shape in {
                "self_attn.q_proj": (self.query, self.hidden),
                "self_attn.k_proj": (self.key, self.hidden),
                "self_attn.v_proj": (self.key, self.hidden),
                "self_attn.o_proj": (self.hidden, self.query),
                "mlp.gate_proj": (self.mlp, self.hidden),
                "mlp.up_proj": (self.mlp, self.hidden),
                "mlp.down_proj": (self.hidden, self.mlp),
            }.items()
        )
        return Block(
            name=path,
            kind="layer",
            tensors=(*matrices, *self._vectors(path)),
            matmul_elements=sum(tensor.elements for tensor in matrices),
            query_width=self.query,
            key_value_width=2 * self.key,
            mlp_width=self.mlp,
        )

    def _vectors(self, path: str) -> Iterator[TensorSpec]:
        widths = [self.hidden] * self.norms + [width for width in self.head_norm if width]
        widths += [self.query, self.key, self.key] if self.bias else []
        for number, width in enumerate(widths):
            yield TensorSpec(name=f"{path}.vector{number}", shape=(width,))


def _llama(hidden: int, mlp: int, layers: int, query: int, key: int, *, tied: bool) -> KnownModel:
    return KnownModel(hidden=hidden, mlp=mlp, layers=layers, query=query, key=key,
                      vocabulary=128256, context=131072, tied=tied)  # fmt: skip


def _qwen2(
    hidden: int, mlp: int, layers: int, query: int, key: int, vocabulary: int, *, tied: bool
) -> KnownModel:
    return KnownModel(hidden=hidden, mlp=mlp, layers=layers, query=query, key=key,
                      vocabulary=vocabulary, context=32768, tied=tied, bias=True)  # fmt: skip


def _qwen3(hidden: int, mlp: int, layers: int, query: int, key: int, *, tied: bool) -> KnownModel:
    return KnownModel(hidden=hidden, mlp=mlp, layers=layers, query=query, key=key,
                      vocabulary=151936, context=40960, tied=tied,
                      head_norm=(128, 128))  # fmt: skip


def _mistral(hidden: int, mlp: int, layers: int, vocabulary: int, context: int) -> KnownModel:
    return KnownModel(hidden=hidden, mlp=mlp, layers=layers, query=4096, key=1024,
                      vocabulary=vocabulary, context=context)  # fmt: skip


def _gemma3(hidden: int, mlp: int, layers: int, query: int, key: int, head: int) -> KnownModel:
    return KnownModel(hidden=hidden, mlp=mlp, layers=layers, query=query, key=key,
                      vocabulary=262208, context=131072, tied=True, norms=4,
                      head_norm=(head, head))  # fmt: skip


KNOWN_MODELS: Mapping[str, KnownModel] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 2048, 1024, tied=True),
    "llama-3.2-1b": _llama(2048, 8192, 16, 2048, 512, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 1536, 256, 151936, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 2048, 1024, tied=True),
    "qwen2.5-3b": _qwen2(2048, 11008, 36, 2048, 256, 151936, tied=True),
    "llama-3.2-3b": _llama(3072, 8192, 28, 3072, 1024, tied=True),
    "gemma-3-4b": _gemma3(2560, 10240, 34, 2048, 1024, 256),
    "qwen3-4b": _qwen3(2560, 9728, 36, 4096, 1024, tied=True),
    "mistral-7b": _mistral(4096, 14336, 32, 32768, 32768),
    "olmo-2-7b": KnownModel(hidden=4096, mlp=11008, layers=32, query=4096, key=4096,
                            vocabulary=100352, context=4096, head_norm=(4096, 4096)),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 3584, 512, 152064, tied=False),
    "llama-3.1-8b": _llama(4096, 14336, 32, 4096, 1024, tied=False),
    "qwen3-8b": _qwen3(4096, 12288, 36, 4096, 1024, tied=False),
    "gemma-2-9b": KnownModel(hidden=3584, mlp=14336, layers=42, query=4096, key=2048,
                             vocabulary=256000, context=8192, tied=True, norms=4),
    "gemma-3-12b": _gemma3(3840, 15360, 48, 4096, 2048, 256),
    "mistral-nemo-12b": _mistral(5120, 14336, 40, 131072, 131072),
    "phi-4": KnownModel(hidden=5120, mlp=17920, layers=40, query=5120, key=1280,
                        vocabulary=100352, context=16384),
    "qwen3-14b": _qwen3(5120, 17408, 40, 5120, 1024, tied=False),
    "mistral-small-24b": _mistral(5120, 32768, 40, 131072, 32768),
    "gemma-3-27b": _gemma3(5376, 21504, 62, 4096, 2048, 128),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 5120, 1024, 152064, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 8192, 1024, tied=False),
    "llama-3.3-70b": _llama(8192, 28672, 80, 8192, 1024, tied=False),
}  # fmt: skip
"""The models by name, the smallest first. Gemma 3 without its vision tower."""
