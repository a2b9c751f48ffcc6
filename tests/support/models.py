"""Inventories of models with their public sizes, without transformers, for tests of planning."""

from __future__ import annotations

from penstock.model.inventory import Block, Inventory, TensorSpec
from penstock.plan.workload import Workload, default_numerics

# hidden size, MLP size, layers, query width, key width (equal to the value width), vocabulary, tied
SIZES = {
    "llama-3.1-8b": (4096, 14336, 32, 4096, 1024, 128256, False),
    "llama-3.1-70b": (8192, 28672, 80, 8192, 1024, 128256, False),
    "qwen2.5-3b": (2048, 11008, 36, 2048, 256, 151936, True),
    "qwen2.5-7b": (3584, 18944, 28, 3584, 512, 152064, False),
    "qwen2.5-14b": (5120, 13824, 48, 5120, 1024, 152064, False),
    "qwen2.5-32b": (5120, 27648, 64, 5120, 1024, 152064, False),
    "mistral-nemo-12b": (5120, 14336, 40, 4096, 1024, 131072, False),
    "8b-tied": (4096, 14336, 32, 4096, 1024, 128256, True),
}


def model(name: str) -> Inventory:
    """Return the inventory of one of the models in `SIZES`."""
    return llama(name, *SIZES[name])


def llama(
    name: str, hidden: int, mlp: int, layers: int, query: int, kv: int, vocabulary: int, tied: bool
) -> Inventory:
    """Return the inventory of a Llama-like model."""

    def tensor(at: str, *shape: int) -> TensorSpec:
        return TensorSpec(name=at, shape=shape)

    def layer(i: int) -> Block:
        at = f"model.layers.{i}"
        linear = [
            tensor(f"{at}.self_attn.q_proj.weight", query, hidden),
            tensor(f"{at}.self_attn.k_proj.weight", kv, hidden),
            tensor(f"{at}.self_attn.v_proj.weight", kv, hidden),
            tensor(f"{at}.self_attn.o_proj.weight", hidden, query),
            tensor(f"{at}.mlp.gate_proj.weight", mlp, hidden),
            tensor(f"{at}.mlp.up_proj.weight", mlp, hidden),
            tensor(f"{at}.mlp.down_proj.weight", hidden, mlp),
        ]
        norms = [tensor(f"{at}.{n}.weight", hidden) for n in ("input_norm", "post_norm")]
        return Block(
            name=at,
            kind="layer",
            tensors=(*linear, *norms),
            matmul_elements=sum(t.elements for t in linear),
            query_width=query,
            heads=max(1, query // 128),
            key_value_width=2 * kv,
            mlp_width=mlp,
        )

    embedding = tensor("model.embed_tokens.weight", vocabulary, hidden)
    norm = tensor("model.norm.weight", hidden)
    own = () if tied else (tensor("lm_head.weight", vocabulary, hidden),)
    head = Block(
        name="lm_head",
        kind="head",
        tensors=(norm, *own),
        borrows=(embedding.name,) if tied else (),
        matmul_elements=vocabulary * hidden,
    )
    return Inventory(
        model=name,
        architecture="LlamaForCausalLM",
        hidden=hidden,
        vocabulary=vocabulary,
        max_context=131072,
        blocks=(
            Block(name="model.embed_tokens", kind="embedding", tensors=(embedding,)),
            *(layer(i) for i in range(layers)),
            head,
        ),
    )


def work(inventory: Inventory, context: int, batch: int, **more: object) -> Workload:
    """Return a workload with the default numerics for the model."""
    micro_batch = more.pop("micro_batch", None)
    numerics = default_numerics(
        inventory,
        context=context,
        batch=batch,
        micro_batch=micro_batch,  # type: ignore[arg-type]
    )
    return Workload(context=context, batch=batch, numerics=numerics, **more)  # type: ignore[arg-type]
