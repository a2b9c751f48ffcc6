"""Training loops of other libraries: phases are detected without any changes to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import penstock
from penstock.observe.run_files import read_run
from tests.observe.training_loops import STEP, expected, phases_and_steps

STEPS = 3


def tiny_model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    make: Any = transformers.LlamaForCausalLM
    return make(config)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_phases_of_a_transformers_trainer_are_detected(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * (4 * STEPS)
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=STEPS, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, gradient_checkpointing=True, use_cpu=True, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=tiny_model(), args=settings, train_dataset=rows)
    with penstock.observe(tmp_path / "run"):
        trainer.train()

    run = read_run(tmp_path / "run")
    wanted = expected(STEPS, ["forward", "backward", "forward", "backward", "update"])
    assert [pair for pair in phases_and_steps(run) if pair[0] != "data"] == wanted
    assert run.notes == ()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_phases_of_fsdp_with_cpu_offload_are_detected(tmp_path: Path) -> None:
    model = tiny_model()
    options: Any = {
        "mesh": init_device_mesh("cpu", (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(16)[None]
    with penstock.observe(tmp_path / "run"):
        for _ in range(STEPS):
            model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    assert phases_and_steps(read_run(tmp_path / "run")) == expected(STEPS, STEP)
