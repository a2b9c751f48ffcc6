"""Files with one tensor per expert are read and written as transformers reads and writes them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from penstock.checkpoint.errors import TensorMismatchError, TensorNotFoundError
from penstock.checkpoint.model_weights import ModelWeights
from penstock.checkpoint.plain_tensors import PART, multiply_fp4
from penstock.checkpoint.writer import ShardWriter, TensorOut
from penstock.errors import UnsupportedModelError
from penstock.generate.load import load_resident
from penstock.model.saved_names import names_on_save
from penstock.model.survey import survey
from penstock.units import MiB
from tests.checkpoint.test_model_weights import change_config, changed, open_weights, read_all
from tests.support.fp8_files import quantize
from tests.support.moe_files import FAMILIES, SIZES, moe_model, save_moe
from tests.support.mxfp4_files import save_mxfp4

BF16 = torch.bfloat16

CORE = ["olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss"]


def families(*long: str) -> list[Any]:
    more = [pytest.param(family, marks=pytest.mark.long) for family in long]
    return [*CORE, *more]


EVERY = families(*(family for family in FAMILIES if family not in CORE))


@pytest.mark.parametrize("family", EVERY)
def test_experts_are_read_into_their_places(tmp_path: Path, family: str) -> None:
    model = save_moe(family, tmp_path, num_hidden_layers=2)

    for part in (997, 1 << 20):  # parts that begin and end anywhere in an expert
        read = read_all(tmp_path, part=part)
        for name, tensor in model.named_parameters():
            assert torch.equal(read[name], tensor), name


@pytest.mark.parametrize("family", EVERY)
def test_a_model_that_was_not_read_is_saved_under_the_names_of_transformers(
    tmp_path: Path, family: str
) -> None:
    model = save_moe(family, tmp_path)
    inventory = survey(tmp_path)

    saved = names_on_save(model, inventory)

    split = {source for layout in saved.splits.values() for source in layout.sources}
    own = {name for name in model.state_dict() if name not in split}
    names = {saved.names.get(name, name) for name in own} | set(saved.splits)
    stored = load_file(tmp_path / "model.safetensors")
    assert names == set(stored)
    for name, layout in saved.splits.items():
        assert layout.shape == stored[name].shape


def test_files_with_fused_experts_are_read_as_they_are(tmp_path: Path) -> None:
    model = moe_model("olmoe")
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")

    read = read_all(tmp_path)

    for name, tensor in model.named_parameters():
        assert torch.equal(read[name], tensor), name
    with ModelWeights(tmp_path, survey(tmp_path), BF16) as weights:
        assert not weights.saved_names.splits


@pytest.mark.parametrize("seed", range(4))
def test_experts_of_random_shapes_in_tiny_shards(tmp_path: Path, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    fields = {"intermediate_size": pick(1, 60), "num_experts": pick(1, 14)}
    fields |= {"num_experts_per_tok": 1, "hidden_size": 4 * pick(2, 11)}
    model = save_moe("olmoe", tmp_path, shard=f"{pick(1, 6)}KB", **fields)
    assert (tmp_path / "model.safetensors.index.json").exists()

    read = read_all(tmp_path, part=pick(1, 5000))

    for name, tensor in model.named_parameters():
        assert torch.equal(read[name], tensor), name


def test_experts_in_several_types_are_read_without_rounding(tmp_path: Path) -> None:
    model = save_moe("olmoe", tmp_path)
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    with changed(tmp_path) as tensors:
        tensors[name] = tensors[name].float() + 2.0**-20

    read = read_all(tmp_path)["model.layers.0.mlp.experts.gate_up_proj"]

    expected = model.model.layers[0].mlp.experts.gate_up_proj.float()
    expected[1, 24:] += 2.0**-20
    assert torch.equal(read, expected)


# Quantized files.


def test_fp8_experts_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    save_moe("qwen3_moe", tmp_path, num_hidden_layers=1)
    with changed(tmp_path) as stored:
        for name in [name for name in stored if ".experts." in name]:
            stored[name], stored[f"{name}_scale_inv"] = quantize(stored[name], (16, 16))
    change_config(
        tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]}
    )

    read = read_all(tmp_path, part=997)

    for number in range(12):
        path = f"model.layers.0.mlp.experts.{number}"
        for leaf, low in (("gate_proj", 0), ("up_proj", 24)):
            found = read["model.layers.0.mlp.experts.gate_up_proj"][number, low : low + 24]
            scales = stored[f"{path}.{leaf}.weight_scale_inv"]
            wide = scales.repeat_interleave(16, 0)[:24].repeat_interleave(16, 1)[:, :32]
            expected = (stored[f"{path}.{leaf}.weight"].float() * wide).to(BF16)
            assert torch.equal(found, expected)


@pytest.mark.parametrize("part", [997, 1 << 20])
def test_mxfp4_experts_have_the_values_that_transformers_computes(
    tmp_path: Path, part: int
) -> None:
    save_mxfp4(tmp_path)
    quantization = transformers.Mxfp4Config(dequantize=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=BF16, quantization_config=quantization
    )

    read = read_all(tmp_path, part=part)

    assert set(read) == {name for name, _ in plain.named_parameters()}
    for name, tensor in plain.named_parameters():
        assert torch.equal(read[name], tensor), name


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_generation_computes_with_the_dequantized_weights(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    save_mxfp4(tmp_path)

    model = load_resident(tmp_path, survey(tmp_path), dtype, "cpu", trust=False)

    read = read_all(tmp_path)
    for name, tensor in model.named_parameters():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, read[name].to(dtype)), name


def test_mxfp4_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    cases: dict[str, Any] = {
        f"{name}_scales: expected shape \\(4, 32, 2\\)": (
            f"{name}_scales", torch.zeros(4, 32, 1, dtype=torch.uint8)),
        f"{name}_blocks: expected U8": (f"{name}_blocks", torch.zeros(4, 32, 2, 16)),
        f"{name}_blocks: expected four dimensions": (
            f"{name}_blocks", torch.zeros(4, 32, 2, 8, dtype=torch.uint8)),
        f"{name}_blocks: expected four dimensions,": (
            f"{name}_blocks", torch.zeros(16, dtype=torch.uint8)),
    }  # fmt: skip
    for number, (message, (changed_name, tensor)) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        save_mxfp4(folder)
        with changed(folder) as tensors:
            tensors[changed_name] = tensor
        with pytest.raises(TensorMismatchError, match=message):
            open_weights(folder)


def test_mxfp4_weights_without_scales_or_of_another_shape_are_refused(tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "a")
    with changed(tmp_path / "a") as tensors:
        del tensors["model.layers.0.mlp.experts.gate_up_proj_scales"]
    with pytest.raises(TensorNotFoundError, match=r"layers\.0\..*gate_up_proj_scales"):
        open_weights(tmp_path / "a")

    save_mxfp4(tmp_path / "b")
    change_config(tmp_path / "b", intermediate_size=96)
    with pytest.raises(UnsupportedModelError, match=r"gate_up_proj.* has shape \(4, 32, 128\)"):
        open_weights(tmp_path / "b")


# Files that do not match the model.

UP = "model.layers.0.mlp.experts.1.up_proj.weight"


@pytest.fixture
def olmoe(tmp_path: Path) -> Path:
    save_moe("olmoe", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [UP, UP.replace("1.up", "3.down"), UP.replace("1.", "0.")])
def test_a_missing_expert_is_named(olmoe: Path, name: str) -> None:
    with changed(olmoe) as tensors:
        del tensors[name]
    with pytest.raises(TensorNotFoundError, match=f"no tensor {name}; it has 44 tensors"):
        open_weights(olmoe)


def test_a_missing_expert_of_mixtral_is_named_as_in_the_files(tmp_path: Path) -> None:
    save_moe("mixtral", tmp_path)
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    with changed(tmp_path) as tensors:
        del tensors[name]
    with pytest.raises(TensorNotFoundError, match=f"no tensor {name};"):
        open_weights(tmp_path)


def test_all_up_projections_missing_are_named(olmoe: Path) -> None:
    with changed(olmoe) as tensors:
        for name in [n for n in tensors if "layers.0." in n and "up_proj" in n]:
            del tensors[name]
    with pytest.raises(TensorNotFoundError, match=r"experts\.0\.up_proj\.weight, .*3\.up_proj"):
        open_weights(olmoe)


def test_an_expert_of_another_shape_is_named_with_its_file(olmoe: Path) -> None:
    with changed(olmoe) as tensors:
        tensors[UP] = tensors[UP][:-1].clone()
    with pytest.raises(UnsupportedModelError, match=rf"{UP} has shape \(23, 32\).*\(24, 32\)"):
        open_weights(olmoe)


def test_an_expert_too_many_is_named(olmoe: Path) -> None:
    with changed(olmoe) as tensors:
        tensors[UP.replace("1.up", "4.up")] = tensors[UP].clone()
    with pytest.raises(UnsupportedModelError, match=r"experts\.4\.up_proj.*with 4 of these"):
        open_weights(olmoe)


def test_an_expert_of_integers_is_refused(olmoe: Path) -> None:
    with changed(olmoe) as tensors:
        tensors[UP] = tensors[UP].to(torch.int8)
    with pytest.raises(TensorMismatchError, match=f"{UP}: expected BF16"):
        open_weights(olmoe)


def test_an_expert_under_two_names_is_refused(olmoe: Path) -> None:
    with changed(olmoe) as tensors:
        tensors[UP.removeprefix("model.")] = tensors[UP].clone()
    with pytest.raises(UnsupportedModelError, match="twice, as "):
        open_weights(olmoe)


def test_experts_one_by_one_and_fused_are_refused(olmoe: Path) -> None:
    with changed(olmoe) as tensors:
        tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(4, 48, 32, dtype=BF16)
    with pytest.raises(UnsupportedModelError, match=r"gate_up_proj of the model twice"):
        open_weights(olmoe)


def test_experts_of_a_layer_that_the_model_does_not_have_are_unexpected(olmoe: Path) -> None:
    name = UP.replace("layers.0", "layers.2")
    with changed(olmoe) as tensors:
        tensors[name] = tensors[UP].clone()
    with ModelWeights(olmoe, survey(olmoe), BF16) as weights:
        assert weights.unexpected == (name,)


def test_an_unknown_operation_is_refused_by_its_name(
    olmoe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import conversion_mapping, core_model_loading

    class Rotate(core_model_loading.ConversionOps):
        def convert(self, input_dict: Any, **_: Any) -> Any:
            return input_dict

    def with_unknown(model: Any, **options: Any) -> Any:
        rules = original(model, **options)
        for rule in rules:
            if isinstance(rule, core_model_loading.WeightConverter):
                rule.operations.append(Rotate())
        return rules

    original = conversion_mapping.get_model_conversion_mapping
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", with_unknown)
    with pytest.raises(UnsupportedModelError, match=r"experts\.0\.\S+ with Rotate when"):
        open_weights(olmoe)


def test_a_shard_that_the_index_names_and_that_is_missing_is_an_error(tmp_path: Path) -> None:
    save_moe("olmoe", tmp_path, shard="20KB")
    index = tmp_path / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"][UP] = "../model-00001-of-00002.safetensors"
    index.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="must name files in the same directory"):
        open_weights(tmp_path)


# Memory.


def peak_growth(action: Callable[[], None]) -> int:
    """Return by how much the memory of this process grows while an action runs."""

    def resident(key: str) -> int:
        found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) << 10

    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = resident("VmRSS")
    action()
    return resident("VmHWM") - before


def test_fused_experts_of_100_mb_are_read_in_less_than_40_mib(tmp_path: Path) -> None:
    fields = SIZES | FAMILIES["olmoe"]
    fields |= {"num_hidden_layers": 1, "hidden_size": 512, "intermediate_size": 1024}
    config = transformers.OlmoeConfig(**fields | {"num_experts": 32})
    config.architectures = ["OlmoeForCausalLM"]
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    inventory = survey(tmp_path)
    saved = names_on_save(model, inventory)
    shapes = {name: layout.shape for name, layout in saved.splits.items()}
    split = set(saved.splits_by_tensor())
    shapes |= {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in split}

    def part(shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
        yield torch.zeros(shape, dtype=BF16)

    tensors = [
        TensorOut(name=name, dtype=BF16, shape=shape, parts=partial(part, shape))
        for name, shape in shapes.items()
    ]
    ShardWriter(tensors).write(tmp_path)

    def read() -> None:
        with ModelWeights(tmp_path, inventory, BF16) as weights:
            for tensor in (tensor for block in inventory.blocks for tensor in block.tensors):
                for low in range(0, tensor.elements, PART):
                    weights.read(tensor, low, min(low + PART, tensor.elements))

    open_weights(tmp_path)  # imports everything
    experts = sum(math.prod(layout.shape) for layout in saved.splits.values())
    assert 2 * experts > 100_000_000
    assert peak_growth(read) < 40 * MiB


def test_every_4_bit_float_times_every_scale_has_the_value_of_ldexp() -> None:
    pairs = torch.arange(256, dtype=torch.uint8).repeat(256)  # 16 groups for each scale
    exponents = torch.arange(256, dtype=torch.uint8).repeat_interleave(16)
    lower = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    halves = torch.stack([pairs % 16, pairs // 16], dim=1).view(-1, 32)
    values = lower[(halves % 8).long()] * (1 - 2 * (halves // 8).float())
    expected = torch.ldexp(values.double(), exponents.long().view(-1, 1) - 127)

    assert torch.equal(multiply_fp4(pairs, exponents), expected.to(BF16).view(-1))
