"""Packing never overlaps tensors that are alive together, and stays close to the lower bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.packing import Lifetime, Packing, pack, peak_nbytes
from penstock.units import GiB

BF16 = 2
"""Bytes of a bf16 number."""

# GiB, MemAscend (arXiv 2505.23254), figure 11: the size of ZeRO-Infinity's pool, and what it needs.
PUBLISHED = {
    "Llama-3.1-8B": (8.81, 2.36),
    "Qwen2.5-7B": (9.14, 2.46),
    "Qwen2.5-14B": (13.05, 3.41),
    "Qwen2.5-32B": (13.05, 3.81),
}


@dataclass(frozen=True)
class Model:
    name: str
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    attention_bias: bool

    @property
    def embedding(self) -> int:
        return self.vocab_size * self.hidden_size * BF16

    def matrices(self) -> dict[str, int]:
        """Return the bytes of the seven matrices of one layer, in bf16."""
        h, inner = self.hidden_size, self.intermediate_size
        kv = h // self.num_attention_heads * self.num_key_value_heads
        numels = {"q": h * h, "k": h * kv, "v": h * kv, "o": h * h}
        numels |= dict.fromkeys(("gate", "up", "down"), h * inner)
        return {name: numel * BF16 for name, numel in numels.items()}

    def layer(self) -> dict[str, int]:
        """Return the bytes of all tensors of one layer: matrices, norms and biases."""
        h = self.hidden_size
        kv = h // self.num_attention_heads * self.num_key_value_heads
        small = {"norm 1": h * BF16, "norm 2": h * BF16}
        if self.attention_bias:
            small |= {"q bias": h * BF16, "k bias": kv * BF16, "v bias": kv * BF16}
        return self.matrices() | small

    def blocks(self) -> list[tuple[str, dict[str, int]]]:
        """Return the blocks in forward order: embedding, layers, head."""
        layers = [(f"layers.{i}", self.layer()) for i in range(self.num_hidden_layers)]
        head = {"norm": self.hidden_size * BF16, "head": self.embedding}
        return [("embed", {"embed": self.embedding}), *layers, ("head", head)]


LLAMA_8B = Model("Llama-3.1-8B", 4096, 32, 14336, 32, 8, 128256, attention_bias=False)
QWEN_7B = Model("Qwen2.5-7B", 3584, 28, 18944, 28, 4, 152064, attention_bias=True)
QWEN_14B = Model("Qwen2.5-14B", 5120, 48, 13824, 40, 8, 152064, attention_bias=True)
QWEN_32B = Model("Qwen2.5-32B", 5120, 64, 27648, 40, 8, 152064, attention_bias=True)

MODELS = [LLAMA_8B, QWEN_7B, QWEN_14B, QWEN_32B]


def zero_infinity_nbytes(model: Model) -> int:
    """Return the size of ZeRO-Infinity's pool: nine slots as large as the largest tensor.

    The nine are the seven matrices of a layer, the embedding and the head.
    """
    return 9 * model.embedding


def nine_tensors(model: Model) -> list[Lifetime[str]]:
    """Return the same nine tensors, all alive at the same time, as MemAscend counts them."""
    nine = {"embed": model.embedding, "head": model.embedding, **model.matrices()}
    return [Lifetime(key=n, nbytes=b, start=0, end=1) for n, b in nine.items()]


def weights_one_ahead(model: Model) -> list[Lifetime[str]]:
    """Return the weights of a step that fetches each block while the previous one computes."""
    return list(_weights(model))


def whole_step(model: Model) -> list[Lifetime[str]]:
    """Return the lifetimes of everything that passes through host staging in one step.

    Weights, outgoing gradients, and the optimizer states of the sweep (remainders and both
    moments), which are read one block ahead and written one block behind.
    """
    return [*_weights(model), *_gradients(model), *_states(model)]


def _weights(model: Model) -> Iterator[Lifetime[str]]:
    blocks = model.blocks()
    turn = len(blocks) - 1  # the head ends forward and starts backward
    for at, (block, tensors) in enumerate(blocks):
        visits = {at} if at in (0, turn) else {at, 2 * turn - at}
        for number, when in enumerate(sorted(visits)):
            for name, nbytes in tensors.items():
                yield Lifetime(
                    key=f"{block}.{name} #{number}", nbytes=nbytes, start=when - 1, end=when + 1
                )


def _gradients(model: Model) -> Iterator[Lifetime[str]]:
    blocks = model.blocks()
    turn = len(blocks) - 1
    for at, (block, tensors) in enumerate(blocks):
        when = 2 * turn - at
        for name, nbytes in tensors.items():
            yield Lifetime(key=f"{block}.{name} gradient", nbytes=nbytes, start=when, end=when + 2)


def _states(model: Model) -> Iterator[Lifetime[str]]:
    for at, (block, tensors) in enumerate(model.blocks()):
        for name, nbytes in tensors.items():
            for role, times in (("low", 1), ("first", 2), ("second", 2)):
                yield Lifetime(
                    key=f"{block}.{name} {role}", nbytes=times * nbytes, start=at - 2, end=at + 1
                )


lifetimes = st.lists(
    st.tuples(st.integers(1, 50_000), st.integers(0, 30), st.integers(1, 12)), max_size=40
).map(
    lambda rows: [
        Lifetime(key=str(i), nbytes=b, start=s, end=s + d) for i, (b, s, d) in enumerate(rows)
    ]
)


def assert_no_overlap(items: list[Lifetime[str]], packing: Packing[str]) -> None:
    for a in items:
        assert packing.offsets[a.key] % 4096 == 0
        assert packing.offsets[a.key] + packing.sizes[a.key] <= packing.nbytes
        for b in items:
            if a.key == b.key or a.end <= b.start or b.end <= a.start:
                continue
            low, high = packing.offsets[a.key], packing.offsets[b.key]
            assert low + packing.sizes[a.key] <= high or high + packing.sizes[b.key] <= low


@settings(max_examples=200, deadline=None)
@given(lifetimes)
def test_tensors_alive_together_never_share_bytes(items: list[Lifetime[str]]) -> None:
    packing = pack(items)

    assert_no_overlap(items, packing)
    assert packing.nbytes >= packing.peak
    assert all(packing.sizes[item.key] >= item.nbytes for item in items)


@settings(max_examples=50, deadline=None)
@given(lifetimes)
def test_more_repair_rounds_never_need_more_bytes(items: list[Lifetime[str]]) -> None:
    quick = pack(items, refinements=0)

    assert_no_overlap(items, quick)
    assert quick.nbytes >= pack(items).nbytes >= quick.peak
    assert pack(items, refinements=0) == quick


def test_a_large_tensor_reuses_the_bytes_of_a_slightly_smaller_one() -> None:
    # The head is the embedding plus a norm: those few bytes must not make it go on top.
    rows = [("embedding", 1000, 0, 10), ("layer", 400, 5, 26), ("head", 1004, 10, 21)]
    items = [Lifetime(key=n, nbytes=b, start=s, end=e) for n, b, s, e in rows]

    assert pack(items, alignment=1, refinements=0).nbytes == peak_nbytes(items) == 1404


def test_pieces_of_similar_size_need_three_slots() -> None:
    # Three are alive at any time, each slightly smaller or larger than the one it replaces.
    sizes = [1000 - (7 * i) % 13 for i in range(60)]
    items = [Lifetime(key=str(i), nbytes=b, start=i, end=i + 3) for i, b in enumerate(sizes)]

    assert pack(items, alignment=1, refinements=0).nbytes <= 3 * max(sizes)


def test_packing_nothing_needs_no_bytes() -> None:
    assert pack([]).nbytes == 0
    assert pack([]).waste == 0


def test_consecutive_tensors_share_bytes() -> None:
    row = [Lifetime(key=str(i), nbytes=4096, start=i, end=i + 1) for i in range(100)]

    assert pack(row).nbytes == 4096


def test_the_peak_is_the_sum_of_tensors_alive_together() -> None:
    items = [
        Lifetime(key="a", nbytes=10, start=0, end=3),
        Lifetime(key="b", nbytes=20, start=2, end=4),
        Lifetime(key="c", nbytes=25, start=3, end=5),
    ]

    assert peak_nbytes(items) == 45
    assert peak_nbytes(items, alignment=4096) == 2 * 4096


def test_duplicate_keys_are_rejected() -> None:
    twice = [Lifetime(key="a", nbytes=1, start=i, end=i + 1) for i in range(2)]

    with pytest.raises(ValueError, match="two buffers have the same key"):
        pack(twice)


@pytest.mark.parametrize(("nbytes", "start", "end"), [(0, 0, 1), (1, 1, 1), (1, 2, 1)])
def test_an_empty_lifetime_is_rejected(nbytes: int, start: int, end: int) -> None:
    with pytest.raises(ValueError, match="a: "):
        Lifetime(key="a", nbytes=nbytes, start=start, end=end)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
@pytest.mark.parametrize("schedule", [nine_tensors, weights_one_ahead, whole_step])
def test_real_models_pack_within_one_percent_of_the_bound(
    model: Model, schedule: Callable[[Model], list[Lifetime[str]]]
) -> None:
    items = schedule(model)

    packing = pack(items)

    assert packing.waste <= 0.01
    assert packing.peak == peak_nbytes(items, alignment=4096)
    if len(items) < 1200:
        assert_no_overlap(items, packing)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_the_published_pool_sizes_follow_from_the_config(model: Model) -> None:
    baseline, need = PUBLISHED[model.name]

    assert round(zero_infinity_nbytes(model) / GiB, 2) == baseline
    assert round(pack(nine_tensors(model)).nbytes / GiB, 2) <= need
    assert pack(weights_one_ahead(model)).nbytes / GiB < need
