"""Quantized checkpoints are known from their config, and refused if Penstock cannot read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.prepare import prepare
from penstock.errors import UnsupportedModelError
from penstock.model.config import load_config
from penstock.model.quantization import Mxfp4, ScaleBlocks, find_quantization
from penstock.model.survey import survey
from penstock.model.survey_cache import cached_survey
from tests.support.engines import plain_model, tiny_config

# As published checkpoints have them.
UNREADABLE: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "fbgemm_fp8": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def write_config_file(folder: Path, **more: Any) -> Path:
    fields = tiny_config("llama").to_dict() | more
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("method", UNREADABLE)
def test_an_unknown_method_is_refused_by_the_survey_and_names_the_way_out(
    tmp_path: Path, method: str
) -> None:
    folder = write_config_file(tmp_path, quantization_config=UNREADABLE[method])
    for look in (survey, cached_survey):
        with pytest.raises(
            UnsupportedModelError, match=rf"quant_method '{method}'.*dequantize\(\)"
        ):
            look(folder)


def test_mxfp4_is_found() -> None:
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    assert find_quantization(config, "model") == Mxfp4()


def test_the_quantization_of_a_multimodal_model_is_found_in_either_config() -> None:
    gptq = {"quantization_config": UNREADABLE["gptq"]}
    for config in (gptq, {"text_config": gptq}):
        with pytest.raises(UnsupportedModelError, match="gptq"):
            find_quantization(config, "model")


def test_early_files_that_do_not_name_their_method_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="bitsandbytes"):
        find_quantization({"quantization_config": {"load_in_8bit": True}}, "model")
    with pytest.raises(UnsupportedModelError, match="not named"):
        find_quantization({"quantization_config": {"bits": 4}}, "model")


@pytest.mark.parametrize(
    ("more", "blocks"),
    [
        ({"weight_block_size": [128, 128]}, ScaleBlocks(128, 128)),
        ({"weight_block_size": [1, 64]}, ScaleBlocks(1, 64)),
        ({}, ScaleBlocks(128, 128)),
        ({"weight_block_size": None}, ScaleBlocks(None, None)),
    ],
)
def test_the_blocks_of_fp8_scales_are_read(more: dict[str, Any], blocks: ScaleBlocks) -> None:
    assert find_quantization({"quantization_config": FP8 | more}, "model") == blocks


@pytest.mark.parametrize("size", [[0, 128], [128], "128", [128.0, 128], [True, 1], [1 << 40, 1]])
def test_invalid_sizes_of_blocks_are_refused(size: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="weight_block_size"):
        find_quantization({"quantization_config": FP8 | {"weight_block_size": size}}, "model")


def test_the_config_of_an_fp8_model_is_that_of_the_unquantized_one(tmp_path: Path) -> None:
    folder = write_config_file(tmp_path, quantization_config=FP8)

    assert not hasattr(load_config(folder), "quantization_config")
    assert find_quantization(tiny_config("llama"), "model") is None


def test_a_live_model_with_quantized_parameters_is_refused() -> None:
    model = plain_model(tiny_config("llama"))
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.to(torch.float8_e4m3fn)

    with pytest.raises(UnsupportedModelError, match=r"up_proj\.weight.*float8_e4m3fn"):
        prepare(model, context=32, batch=2, device="cpu", budget={"hbm": "64MiB", "dram": "64MiB"})


def test_the_largest_block_of_scales_has_a_mebi_of_rows() -> None:
    def blocks(size: int) -> ScaleBlocks | None:
        config = {"quantization_config": FP8 | {"weight_block_size": [size, 1]}}
        return find_quantization(config, "model")

    assert blocks(1 << 20) == ScaleBlocks(1 << 20, 1)
    with pytest.raises(UnsupportedModelError, match="weight_block_size"):
        blocks((1 << 20) + 1)
