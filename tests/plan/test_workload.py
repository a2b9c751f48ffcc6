"""Workloads and default numerics."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import WorkloadError
from penstock.model.inventory import Inventory
from penstock.plan.working_memory_estimate import estimate_working_memory
from penstock.plan.workload import Numerics, Workload, default_numerics, resized
from penstock.records import from_json
from penstock.roles import Dtype
from tests.support.models import model, work


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 0}, "^context: must be 1 or more, got 0"),
        ({"batch": -1}, "^batch: must be 1 or more, got -1"),
        ({"clip": -0.5}, "^clip: must be above 0, got -0.5"),
        ({"rank": 2}, "^rank: must be 0 to 0, got 2"),
    ],
)
def test_an_invalid_workload_names_the_field(change: dict[str, float], message: str) -> None:
    numerics = default_numerics(model("qwen2.5-3b"), context=4096, batch=4)
    with pytest.raises(WorkloadError, match=message):
        Workload(**{"context": 4096, "batch": 4, "numerics": numerics, **change})  # type: ignore[arg-type]


def test_a_step_has_all_tokens_of_its_batch_and_as_many_micro_batches_as_needed() -> None:
    workload = work(model("qwen2.5-3b"), 128, 7, micro_batch=2)

    assert (workload.tokens, workload.micro_batches) == (7 * 128, 4)


def test_a_context_longer_than_the_model_supports_is_rejected() -> None:
    inventory = model("qwen2.5-3b")
    with pytest.raises(WorkloadError, match=r"^context: is 200000, .* cover 131072"):
        work(inventory, 200_000, 1).check(inventory)


def test_default_numerics_depend_on_model_and_context() -> None:
    short = default_numerics(model("llama-3.1-8b"), context=4096, batch=64)
    long = default_numerics(model("llama-3.1-8b"), context=131072, batch=64)

    assert (short.micro_batch, long.micro_batch) == (4, 1)
    assert short.loss_chunk == long.loss_chunk == 1024
    assert default_numerics(model("qwen2.5-7b"), context=4096, batch=64).loss_chunk == 512


def test_tiles_and_fused_chunks_in_fp32_have_half_as_many_tokens() -> None:
    """Their bytes are limited. Without the fused kernel, logits are converted to fp32 anyway."""
    inventory = replace(model("llama-3.1-8b"), vocabulary=262144)

    def sizes(dtype: Dtype, kernels: bool) -> tuple[int, int]:
        numerics = default_numerics(inventory, context=4096, batch=8, kernels=kernels, dtype=dtype)
        return numerics.mlp_tile, numerics.loss_chunk

    assert sizes("bf16", kernels=True) == (16384, 2048)
    assert sizes("fp32", kernels=True) == (8192, 1024)
    assert sizes("bf16", kernels=False) == (16384, 512)
    assert sizes("fp32", kernels=False) == (8192, 512)


def test_a_custom_loss_or_capped_logits_rule_out_the_fused_loss_kernel() -> None:
    plain = model("llama-3.1-8b")

    def loss(inventory: Inventory, **options: bool) -> tuple[str, int]:
        numerics = default_numerics(inventory, context=4096, batch=8, kernels=True, **options)
        return numerics.loss_kernel, numerics.loss_chunk

    assert loss(plain) == ("fused", 2048)
    assert loss(plain, own_loss=True) == ("torch", 1024)
    assert loss(replace(plain, caps_logits=True)) == ("torch", 1024)


def test_varlen_attention_is_the_default_if_the_kernel_supports_the_model() -> None:
    other = model("llama-3.1-8b")
    plain = replace(other, plain_attention=True)

    def attention(inventory: Inventory, kernels: bool) -> str:
        return default_numerics(inventory, context=4096, batch=8, kernels=kernels).attention

    assert attention(plain, True) == "varlen"
    assert attention(plain, False) == attention(other, True) == "sdpa"
    numerics = default_numerics(plain, context=4096, batch=8, kernels=True)
    workload = Workload(context=4096, batch=8, numerics=numerics)
    workload.check(plain)
    with pytest.raises(WorkloadError, match=r"^numerics.attention: is varlen, but .* use sdpa"):
        workload.check(other)


def test_a_resized_workload_keeps_what_the_user_set() -> None:
    inventory = model("llama-3.1-8b")
    default = work(inventory, 4096, 8)
    assert default.numerics.micro_batch == 4
    chosen = replace(default, numerics=replace(default.numerics, micro_batch=3, compiled=True))

    assert resized(default, inventory, context=2048).numerics.micro_batch == 8
    assert resized(default, inventory, batch=2).numerics.micro_batch == 2
    assert resized(chosen, inventory, context=2048).numerics == chosen.numerics
    assert resized(chosen, inventory, batch=2).numerics == replace(chosen.numerics, micro_batch=2)
    longer = resized(chosen, inventory, context=8192, batch=16)
    assert (longer.context, longer.batch, longer.numerics) == (8192, 16, chosen.numerics)


OLD_NUMERICS = """{
  "micro_batch": 4, "loss_chunk": 2048, "mlp_tile": 32768, "attention": "varlen",
  "loss_kernel": "fused", "compiled": true, "deterministic": false, "master_rounding": "ties_away"
}"""
"""As written to plans and checkpoints before `head_sum` existed."""


def test_numerics_written_before_keep_their_head_sum_and_their_kernels() -> None:
    old = from_json(Numerics, json.loads(OLD_NUMERICS), where="plan.json")

    assert (old.head_sum, old.deterministic) == ("chunk", False)
    new = default_numerics(model("llama-3.1-8b"), context=4096, batch=8)
    assert (new.head_sum, new.deterministic) == ("micro", True)


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, True),
        ({"batch": 4}, False),
        ({"batch": 4, "accumulate": True}, True),
        ({"head_sum": "chunk"}, False),
        ({"loss_chunk": 4 * 4096}, False),
    ],
    ids=["two micro-batches", "one micro-batch", "accumulated", "by chunk", "one chunk"],
)
def test_the_heads_sum_of_a_micro_batch_is_planned_where_it_is_needed(
    changes: dict[str, Any], needed: bool
) -> None:
    inventory = model("llama-3.1-8b")
    base = work(inventory, 4096, 8)
    numbers = {k: v for k, v in changes.items() if k in ("head_sum", "loss_chunk")}
    others = {k: v for k, v in changes.items() if k not in numbers}
    workload = replace(base, **others, numerics=replace(base.numerics, **numbers))
    without = replace(workload, numerics=replace(workload.numerics, head_sum="chunk"))

    more, less = (estimate_working_memory(inventory, w).parts[-1] for w in (workload, without))

    assert workload.has_head_sum is needed
    tables = inventory.vocabulary * inventory.hidden
    assert more.backward - less.backward == (4 * tables if needed else 0)
    assert more.forward == less.forward


def test_every_rank_needs_a_micro_batch_and_the_micro_batch_stays() -> None:
    llama = model("llama-3.1-8b")

    with pytest.raises(WorkloadError, match=r"^batch: is 3 micro-batches of 2, .* 4 ranks.* 8 or"):
        work(llama, 4096, 6, micro_batch=2, world=4)
    for world in (1, 2, 3):
        workload = work(llama, 4096, 12, world=world)
        assert workload.numerics == work(llama, 4096, 12).numerics


def test_a_head_sum_by_chunks_is_refused_on_several_ranks() -> None:
    workload = work(model("llama-3.1-8b"), 4096, 6, micro_batch=2)
    numerics = replace(workload.numerics, head_sum="chunk")

    with pytest.raises(WorkloadError, match=r"numerics.head_sum: .* the number of ranks"):
        replace(workload, numerics=numerics, world=2)
    one_chunk = replace(numerics, loss_chunk=2 * 4096)
    assert replace(workload, numerics=one_chunk, world=2).world == 2
