"""Sizes of well-known models, so that `penstock fit` can plan for them without a download.

The figures are those of the published `config.json` files. Every one of these models is a plain
decoder: embedding, layers of attention and a gated MLP or a mixture of such MLPs, norm, head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.model.inventory import Block, Inventory, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The sizes of a mixture of experts."""

    count: int
    """Number of experts in a layer."""
    active: int
    """Number of experts that compute a token."""
    width: int
    """Width of an expert's MLP."""
    shared: int = 0
    """Width of the MLP that computes all tokens next to the experts; 0 for none."""
    dense_layers: int = 0
    """Number of layers at the start that have an ordinary MLP instead."""
    bias: bool = False
    """Whether experts and routers have biases, and attention heads sinks, as in gpt-oss."""


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
    experts: Experts | None = None
    """The experts that layers have in place of the MLP; None for a dense model."""

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
                *(self._layer(f"model.layers.{i}", i) for i in range(self.layers)),
                head,
            ),
        )

    def _layer(self, path: str, index: int) -> Block:
        experts = self.experts if self.experts and index >= self.experts.dense_layers else None
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (self.query, self.hidden),
            "self_attn.k_proj.weight": (self.key, self.hidden),
            "self_attn.v_proj.weight": (self.key, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, self.query),
        }
        if experts is None:
            shapes |= self._mlp("mlp", self.mlp)
        else:
            shapes |= self._routed(experts)
        matrices = tuple(TensorSpec(name=f"{path}.{n}", shape=s) for n, s in shapes.items())
        active = experts.active / experts.count if experts else 1
        return Block(
            name=path,
            kind="layer",
            tensors=(*matrices, *self._vectors(path, experts)),
            matmul_elements=sum(
                round(t.elements * (active if ".experts." in t.name else 1)) for t in matrices
            ),
            query_width=self.query,
            key_value_width=2 * self.key,
            mlp_width=experts.active * experts.width if experts else self.mlp,
            active_experts=experts.active if experts else 0,
        )

    def _mlp(self, path: str, width: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{path}.gate_proj.weight": (width, self.hidden),
            f"{path}.up_proj.weight": (width, self.hidden),
            f"{path}.down_proj.weight": (self.hidden, width),
        }

    def _routed(self, experts: Experts) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a router and of the experts that it chooses from."""
        shapes: dict[str, tuple[int, ...]] = {
            "mlp.gate.weight": (experts.count, self.hidden),
            "mlp.experts.gate_up_proj": (experts.count, 2 * experts.width, self.hidden),
            "mlp.experts.down_proj": (experts.count, self.hidden, experts.width),
        }
        if experts.bias:
            shapes |= {
                "mlp.experts.gate_up_proj_bias": (experts.count, 2 * experts.width),
                "mlp.experts.down_proj_bias": (experts.count, self.hidden),
            }
        return shapes | (self._mlp("mlp.shared", experts.shared) if experts.shared else {})

    def _vectors(self, path: str, experts: Experts | None) -> Iterator[TensorSpec]:
        widths = [self.hidden] * self.norms + [width for width in self.head_norm if width]
        widths += [self.query, self.key, self.key] if self.bias else []
        if experts is not None and experts.bias:
            # The bias of attention's output, of the router, and one sink for each head of 64.
            widths += [self.hidden, experts.count, self.query // 64]
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
    "olmoe-1b-7b": KnownModel(
        hidden=2048, mlp=0, layers=16, query=2048, key=2048, vocabulary=50304, context=4096,
        head_norm=(2048, 2048), experts=Experts(count=64, active=8, width=1024),
    ),
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
    "gpt-oss-20b": KnownModel(
        hidden=2880, mlp=0, layers=24, query=4096, key=512, vocabulary=201088, context=131072,
        bias=True, experts=Experts(count=32, active=4, width=2880, bias=True),
    ),
    "mistral-small-24b": _mistral(5120, 32768, 40, 131072, 32768),
    "gemma-3-27b": _gemma3(5376, 21504, 62, 4096, 2048, 128),
    "qwen3-30b-a3b": KnownModel(
        hidden=2048, mlp=0, layers=48, query=4096, key=512, vocabulary=151936, context=40960,
        head_norm=(128, 128), experts=Experts(count=128, active=8, width=768),
    ),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 5120, 1024, 152064, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 8192, 1024, tied=False),
    "mixtral-8x7b": KnownModel(
        hidden=4096, mlp=0, layers=32, query=4096, key=1024, vocabulary=32000, context=32768,
        experts=Experts(count=8, active=2, width=14336),
    ),
    "llama-3.3-70b": _llama(8192, 28672, 80, 8192, 1024, tied=False),
    "glm-4.5-air": KnownModel(
        hidden=4096, mlp=10944, layers=46, query=12288, key=1024, vocabulary=151552,
        context=131072, bias=True,
        experts=Experts(count=128, active=8, width=1408, shared=1408, dense_layers=1),
    ),
}  # fmt: skip
"""The models by name, the smallest first. Gemma 3 without its vision tower."""

HUB_IDS: Mapping[str, str] = {
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "gemma-3-4b": "google/gemma-3-4b-pt",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "mistral-7b": "mistralai/Mistral-7B-v0.3",
    "olmo-2-7b": "allenai/OLMo-2-1124-7B",
    "olmoe-1b-7b": "allenai/OLMoE-1B-7B-0924",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "gemma-2-9b": "google/gemma-2-9b",
    "gemma-3-12b": "google/gemma-3-12b-pt",
    "mistral-nemo-12b": "mistralai/Mistral-Nemo-Base-2407",
    "phi-4": "microsoft/phi-4",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "mistral-small-24b": "mistralai/Mistral-Small-24B-Base-2501",
    "gemma-3-27b": "google/gemma-3-27b-pt",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "glm-4.5-air": "zai-org/GLM-4.5-Air",
}
"""The name of each model on the Hugging Face Hub."""
