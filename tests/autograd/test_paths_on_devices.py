"""Trainers, and models with images, on a GPU. `long` runs the same code on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import penstock as ps
from penstock.integrations import PenstockConfig, PenstockTrainer
from tests.support.multimodal_models import batch, build
from tests.support.trainers import arguments, compare_logs, examples, pad, tiny_model

DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.long),
]

BUDGET = {"hbm": "6GiB", "dram": "1GiB"}
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.999)}
LIMITS = {"cpu": 1e-5, "cuda": 1e-4}
"""Relative differences that kernels of another order of sums may make in fp32."""

pytestmark = pytest.mark.filterwarnings("default")


def train_with(trainer_class: Any, model: Any, out: Path, device: str, **options: Any) -> Any:
    args = arguments(out, use_cpu=device == "cpu")
    trainer = trainer_class(
        model=model, args=args, train_dataset=examples(72), data_collator=pad, **options
    )
    trainer.train()
    return trainer.state.log_history


def penstock_options() -> dict[str, Any]:
    return {"penstock": PenstockConfig(**BUDGET, self_check=False, show_plan=False)}


@pytest.mark.parametrize("device", DEVICES)
def test_penstock_trainer_logs_what_trainer_logs(device: str, tmp_path: Path) -> None:
    ours = train_with(PenstockTrainer, tiny_model(), tmp_path, device, **penstock_options())
    theirs = train_with(transformers.Trainer, tiny_model(), tmp_path, device)
    compare_logs(ours, theirs, LIMITS[device])


@pytest.mark.parametrize("device", DEVICES)
def test_lora_in_penstock_trainer_logs_what_trainer_logs(device: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install peft)")

    def adapted() -> Any:
        model = tiny_model()
        torch.manual_seed(3)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))

    ours = train_with(PenstockTrainer, adapted(), tmp_path, device, **penstock_options())
    theirs = train_with(transformers.Trainer, adapted(), tmp_path, device)
    compare_logs(ours, theirs, LIMITS[device])


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_losses_with_images_equal_plain_torch(device: str, dtype: torch.dtype, name: str) -> None:
    losses: list[list[float]] = []
    for streamed in (False, True):
        model = build(name, dtype)
        if streamed:
            model, optimizer = ps.stream(
                model, tokens=64, budget=BUDGET, device=device, self_check=False,
                loss_memory="64MiB", **ADAMW,
            )  # fmt: skip
        else:
            model = model.to(device)
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, **ADAMW)
        losses.append([])
        # Plain torch rounds updates to 16 bits, and Penstock has fp32 master weights.
        for step in range(3 if dtype == torch.float32 else 1):
            inputs = batch(name, step, device=device)
            inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
            loss = model(**inputs).loss
            loss.backward()
            trained = [p for p in model.parameters() if p.requires_grad]
            norm = float(torch.nn.utils.clip_grad_norm_(trained, 1.0))
            optimizer.step()
            optimizer.zero_grad()
            losses[-1] += [loss.item(), norm]
        if streamed:
            model.close()
    limit = LIMITS[device] if dtype == torch.float32 else 0.02
    assert losses[1] == pytest.approx(losses[0], rel=limit)
