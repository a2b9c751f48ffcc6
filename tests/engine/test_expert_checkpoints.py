"""Engines save a model with experts as its files were: the same names, shapes and bytes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from penstock.engine.engine import Engine
from penstock.engine.prepare import prepare
from penstock.model import tensor_layout
from penstock.model.config import load_config
from penstock.model.saved_names import SavedNames, names_on_save
from penstock.roles import Role
from tests.support.engines import inventory, make_engine, make_plan_of, workload
from tests.support.moe_files import save_moe
from tests.support.mxfp4_files import save_mxfp4

BF16 = torch.bfloat16
CORE = ["olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss"]


def engine_of(folder: Path, tmp_path: Path, places: str = "dddd", **options: Any) -> Engine:
    """Return an engine with random weights for the model of a directory."""
    config = load_config(folder)
    model, piece = inventory(config), options.pop("piece", 1 << 26)
    plan = make_plan_of(model, workload(**options), places, disk=tmp_path, piece=piece)
    return make_engine(config, plan, model, None)


def model_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("model*"))}


def weights_of(engine: Engine, role: Role = Role.WEIGHT) -> dict[str, torch.Tensor]:
    tensors = [t for block in engine.inventory.blocks for t in block.tensors]
    return {
        t.name: torch.cat([part.clone() for part in engine.access.parts(t.name, role)])
        for t in tensors
    }


@pytest.mark.parametrize(
    ("family", "places", "shard"),
    [*((family, "dddd", "5GB") for family in CORE), ("qwen3_moe", "nnnn", "9KB"),
     ("mixtral", "hddd", "9KB")],
)  # fmt: skip
def test_reading_and_writing_gives_the_same_files(
    tmp_path: Path, family: str, places: str, shard: str
) -> None:
    save_moe(family, tmp_path / "model", shard=shard)

    # On NVMe, each piece has parts of several experts, and an expert is in several pieces.
    with engine_of(tmp_path / "model", tmp_path, places, piece=8192) as engine:
        engine.files.read_weights(tmp_path / "model")
        engine.write(tmp_path / "saved", optimizer=False)

    assert model_files(tmp_path / "saved") == model_files(tmp_path / "model")


def test_a_checkpoint_continues_with_the_same_states(tmp_path: Path) -> None:
    save_moe("olmoe", tmp_path / "model", torch.float32)
    with engine_of(tmp_path / "model", tmp_path) as engine:
        engine.files.read_weights(tmp_path / "model")
        engine.write(tmp_path / "saved")
        expected = weights_of(engine), weights_of(engine, Role.MASTER)
        assert any(rest.any() for rest in expected[1].values())
    shutil.copy(tmp_path / "model/config.json", tmp_path / "saved")

    with engine_of(tmp_path / "model", tmp_path, "nnnn") as engine:
        engine.read(tmp_path / "saved")
        found = weights_of(engine), weights_of(engine, Role.MASTER)
        engine.write(tmp_path / "again")

    for before, after in zip(expected, found, strict=True):
        for name, values in before.items():
            assert torch.equal(after[name], values), name
    stored = load_file(tmp_path / "saved/model.safetensors")
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in stored
    assert model_files(tmp_path / "again") == model_files(tmp_path / "saved")


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_random_weights_are_saved_as_transformers_saves_them(tmp_path: Path, family: str) -> None:
    model = save_moe(family, tmp_path / "model")
    with engine_of(tmp_path / "model", tmp_path) as engine:
        engine.files.saved_names = names_on_save(model, engine.inventory)
        engine.write(tmp_path / "saved", optimizer=False)
        expected = weights_of(engine)

    saved = load_file(tmp_path / "saved/model.safetensors")
    assert saved.keys() == load_file(tmp_path / "model/model.safetensors").keys()
    model.config.save_pretrained(tmp_path / "saved")
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=BF16, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor.view(-1), expected[name]), name


def test_mxfp4_weights_are_saved_as_bf16_that_transformers_loads(tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "model")
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=BF16,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )  # fmt: skip
    with engine_of(tmp_path / "model", tmp_path) as engine:
        engine.files.read_weights(tmp_path / "model")
        engine.write(tmp_path / "saved", optimizer=False)

    load_config(tmp_path / "model").save_pretrained(tmp_path / "saved")
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    expected = plain.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == BF16
        assert torch.equal(tensor, expected[name]), name


def test_a_transposed_tensor_is_written_in_the_order_of_the_file(tmp_path: Path) -> None:
    save_moe("olmoe", tmp_path / "model")
    name = "model.layers.1.mlp.experts.down_proj"
    with engine_of(tmp_path / "model", tmp_path) as engine:
        layout = tensor_layout.transpose(tensor_layout.whole(name, (4, 32, 24)), 1, 2)
        engine.files.saved_names = SavedNames(splits={"transposed": layout})
        engine.write(tmp_path / "saved", optimizer=False)
        expected = weights_of(engine)[name].view(4, 32, 24).transpose(1, 2)

    saved = load_file(tmp_path / "saved/model.safetensors")
    assert name not in saved
    assert torch.equal(saved["transposed"], expected)


def test_steps_with_a_learning_rate_of_0_leave_the_files_as_they_were(tmp_path: Path) -> None:
    save_moe("mixtral", tmp_path / "model", shard="9KB")
    ids = torch.randint(3, 60, (2, 16), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"optimizer": {"lr": 0.0}, "self_check": False, "device": "cpu"}
    budget = {"hbm": "64MiB", "dram": "64MiB"}

    with prepare(tmp_path / "model", context=16, batch=2, budget=budget, **options) as engine:
        for _ in range(2):
            engine.step({"input_ids": ids, "labels": ids})
        engine.write(tmp_path / "saved")

    assert model_files(tmp_path / "saved") == model_files(tmp_path / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, tensor in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
