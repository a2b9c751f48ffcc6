"""The self-check on a GPU: compiled layers, attention kernels, the fused loss, and the memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.engine.device import pick_device
from penstock.errors import SelfCheckError
from penstock.model import document_attention
from penstock.plan.cuda_allocator import PAGE
from tests.support.engines import plain_model, tiny_config
from tests.support.self_checks import KERNELS, TILES, check

pytestmark = pytest.mark.gpu

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"loss_kernel": "torch"},  # the fused kernel supports no cap of the logits
    "gpt2": {},
}


def run(family: str, **changes: Any) -> None:
    options = {**FAMILIES[family], **changes}
    fields = {k: options.pop(k) for k in ("tie_word_embeddings",) if k in options}
    check(family, "cuda", config=tiny_config(family, **fields), **{**KERNELS, **TILES, **options})


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_passes_on_the_gpu(family: str) -> None:
    run(family)


@pytest.mark.parametrize("loss_kernel", ["torch", "fused"])
def test_label_smoothing_passes_on_the_gpu(loss_kernel: str) -> None:
    run("llama", label_smoothing=0.1, loss_kernel=loss_kernel)


@pytest.mark.parametrize("path", ["compiled", "attention", "loss_kernel"])
def test_each_path_of_the_gpu_passes_by_itself(path: str) -> None:
    others = {"compiled": False, "attention": "sdpa", "loss_kernel": "torch"}
    run("llama", **{**others, path: KERNELS[path]})


def test_a_wrong_scale_of_attention_on_the_gpu_only_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend = document_attention.attend_packed

    def scaled(*args: Any, scale: float | None, **options: Any) -> torch.Tensor:
        return attend(*args, scale=2 * (scale or args[0].shape[-1] ** -0.5), **options)

    monkeypatch.setattr(document_attention, "attend_packed", scaled)

    with pytest.raises(SelfCheckError) as error:
        run("llama", compiled=False)

    assert error.value.where.startswith("on cuda in bf16")
    assert error.value.tensor == "model.layers.0"


def test_nothing_is_left_on_the_gpu_and_random_numbers_stay(tmp_path: Path) -> None:
    run("llama", loss_kernel="torch")  # libraries allocate their workspaces
    device = pick_device("cuda")
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    state = torch.cuda.get_rng_state()

    run("llama")

    gc.collect()
    torch.cuda.synchronize()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    # Streams are new for each device object, and cuBLAS keeps a workspace for each of two threads.
    workspaces = 2 * 32 << 20
    assert torch.cuda.memory_allocated() - allocated <= workspaces
    assert torch.cuda.memory_reserved() - reserved <= workspaces + PAGE
    assert device.memory().peak <= torch.cuda.memory_reserved()


def test_prepare_checks_on_the_gpu_before_it_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of the engine's memory is what the plan says, with the self-check before it."""
    model = plain_model(tiny_config("llama", head_dim=16, hidden_size=64))
    with penstock.prepare(
        model, context=32, batch=2, budget={"hbm": "4GiB", "dram": "1GiB"}
    ) as engine:
        assert engine.self_checked
        ids = torch.randint(3, 260, (2, 32))
        engine.step({"input_ids": ids})
        assert engine.tiers()["hbm"]["peak"] <= engine.plan.budget.hbm
