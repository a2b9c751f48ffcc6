"""Weights are read under the model's names and with their scales, or refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.checkpoint.errors import (
    CheckpointWarning,
    TensorMismatchError,
    TensorNotFoundError,
)
from penstock.checkpoint.model_weights import ModelWeights
from penstock.engine.model_source import check_weights
from penstock.engine.prepare import prepare
from penstock.errors import UnsupportedModelError
from penstock.model.inventory import Inventory
from penstock.model.survey import survey
from tests.support.engines import plain_model, tiny_config
from tests.support.fp8_files import save_fp8

BF16 = torch.bfloat16

RESIDENT: dict[str, Any] = {
    "context": 32, "batch": 2, "device": "cpu", "budget": {"hbm": "64MiB", "dram": "64MiB"},
}  # fmt: skip


def read_all(folder: Path, *, dtype: torch.dtype = BF16, part: int = 1000) -> dict[str, Any]:
    """Read a directory's weights in parts that begin and end anywhere in a row."""
    inventory = survey(folder)
    read = {}
    with ModelWeights(folder, inventory, dtype) as weights:
        for tensor in (t for block in inventory.blocks for t in block.tensors):
            parts = [
                weights.read(tensor, low, min(low + part, tensor.elements)).clone()
                for low in range(0, tensor.elements, part)
            ]
            assert {p.dtype for p in parts} == {weights.dtype(tensor)}
            read[tensor.name] = torch.cat(parts).view(tensor.shape)
    return read


def fp8_model(folder: Path, hidden: int, mlp: int, block: tuple[int, int] = (128, 128)) -> Path:
    config = tiny_config(
        "llama", hidden_size=hidden, intermediate_size=mlp, head_dim=hidden // 4, vocab_size=64,
        num_hidden_layers=1,
    )  # fmt: skip
    return save_fp8(plain_model(config), folder, block)


@pytest.mark.parametrize("part", [1000, 1 << 20])
@pytest.mark.parametrize(("hidden", "mlp"), [(256, 384), (40, 88), (128, 100)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_fp8_weights_are_those_that_transformers_dequantizes(
    tmp_path: Path, hidden: int, mlp: int, dtype: torch.dtype, part: int
) -> None:
    folder = fp8_model(tmp_path, hidden, mlp)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()

    read = read_all(folder, dtype=dtype, part=part)

    stored = load_file(folder / "model.safetensors")
    for name, values in read.items():
        if stored[name].dtype == torch.float8_e4m3fn:
            assert values.dtype == plain[name].dtype == dtype
            assert torch.equal(values.view(torch.int16), plain[name].view(torch.int16)), name
    largest = read["model.layers.0.self_attn.q_proj.weight"].abs().max()
    assert largest < 0.2  # 448 without the scales


@pytest.mark.parametrize("part", [997, 1 << 20])
@pytest.mark.parametrize("block", [(128, 128), (16, 48), (1, 32)])
def test_the_last_block_of_a_row_or_column_may_be_partial(
    tmp_path: Path, block: tuple[int, int], part: int
) -> None:
    # transformers spreads the scales evenly over such a matrix when it dequantizes it, but its FP8
    # kernels, like those that wrote the file, count blocks from the first row and column.
    folder = fp8_model(tmp_path, 200, 300, block)
    stored = load_file(folder / "model.safetensors")

    read = read_all(folder, part=part)

    for name in (n for n in stored if f"{n}_scale_inv" in stored):
        scales = stored[f"{name}_scale_inv"]
        rows, columns = stored[name].shape
        expected = torch.empty(rows, columns, dtype=BF16)
        for i in range(rows):
            of_row = scales[i // block[0]]
            of_column = torch.tensor([of_row[j // block[1]] for j in range(columns)])
            expected[i] = (stored[name][i].float() * of_column).to(BF16)
        assert torch.equal(read[name], expected), name


def test_one_scale_for_a_whole_matrix(tmp_path: Path) -> None:
    folder = fp8_model(tmp_path, 32, 64)
    change_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": None})
    name = "model.layers.0.mlp.up_proj.weight"
    with changed(folder) as tensors:
        scale = tensors[f"{name}_scale_inv"].reshape(())
        tensors[f"{name}_scale_inv"] = scale
    expected = (load_file(folder / "model.safetensors")[name].float() * scale).to(BF16)

    assert torch.equal(read_all(folder)[name], expected)


@pytest.mark.parametrize("dtype", [BF16, torch.float8_e8m0fnu, torch.uint8])
def test_scales_of_other_types(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = fp8_model(tmp_path, 256, 128)
    name = "model.layers.0.mlp.up_proj.weight"
    with changed(folder) as tensors:
        scales = torch.tensor([[0.25, 2.0**-9]])
        exponents = (scales.log2() + 127).to(torch.uint8)
        stored = exponents if dtype == torch.uint8 else scales.to(dtype)
        tensors[f"{name}_scale_inv"] = stored
        expected = tensors[name].float() * scales.repeat_interleave(128, 1)

    assert torch.equal(read_all(folder)[name], expected.to(BF16))


# Files that do not match the model.


class changed:  # noqa: N801
    """Change the tensors of a directory's only file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model.safetensors"

    def __enter__(self) -> dict[str, torch.Tensor]:
        self.tensors = load_file(self.path)
        return self.tensors

    def __exit__(self, *_: object) -> None:
        save_file(self.tensors, self.path)


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def open_weights(folder: Path, inventory: Inventory | None = None) -> None:
    ModelWeights(folder, inventory or survey(folder), BF16).close()


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    return fp8_model(tmp_path, 256, 128)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    plain_model(tiny_config("llama")).save_pretrained(tmp_path)
    return tmp_path


UP = "model.layers.0.mlp.up_proj.weight"


def test_fp8_weights_without_scales_are_refused(fp8: Path) -> None:
    with changed(fp8) as tensors:
        del tensors[f"{UP}_scale_inv"]
    with pytest.raises(TensorNotFoundError, match=r"up_proj\.weight_scale_inv"):
        open_weights(fp8)


@pytest.mark.parametrize("shape", [(2, 1), (1, 3), (2,), (0, 2)])
def test_scales_of_another_shape_are_refused(fp8: Path, shape: tuple[int, ...]) -> None:
    with changed(fp8) as tensors:
        tensors[f"{UP}_scale_inv"] = torch.ones(shape)
    with pytest.raises(TensorMismatchError, match=r"model.safetensors.*scale_inv.*\(1, 2\)"):
        open_weights(fp8)


def test_fp8_weights_without_a_quantization_config_are_refused(fp8: Path) -> None:
    change_config(fp8, quantization_config=None)
    with changed(fp8) as tensors:
        for name in [n for n in tensors if n.endswith("_scale_inv")]:
            del tensors[name]
    with pytest.raises(UnsupportedModelError, match="no quantization_config"):
        open_weights(fp8)


def test_scales_of_a_weight_that_is_not_fp8_are_refused(fp8: Path) -> None:
    with changed(fp8) as tensors:
        tensors[UP] = tensors[UP].to(BF16)
    with pytest.raises(TensorMismatchError, match="F8_E4M3, because it has scales"):
        open_weights(fp8)


def test_a_missing_tensor_is_named(llama: Path) -> None:
    with changed(llama) as tensors:
        del tensors[UP]
    with pytest.raises(TensorNotFoundError, match=f"no tensor {UP}"):
        open_weights(llama)


def test_several_missing_tensors_are_named(llama: Path) -> None:
    with changed(llama) as tensors:
        for name in [n for n in tensors if "layers.0." in n]:
            del tensors[name]
    wanted = r"no tensor model\.layers\.0\.\S+, model\.layers\.0\.\S+, .* and 5 more"
    with pytest.raises(TensorNotFoundError, match=wanted):
        open_weights(llama)


# Tensors that only the files have.

OLD_BUFFERS = (
    "model.layers.0.self_attn.rotary_emb.inv_freq", "transformer.h.0.attn.bias",
    "transformer.h.0.attn.masked_bias", "gpt_neox.layers.1.attention.bias",
)  # fmt: skip


def test_a_tensor_that_the_model_does_not_have_is_a_warning(llama: Path) -> None:
    names = [f"model.layers.9.{part}" for part in ("mlp.up_proj.weight", "eh_proj.weight")]
    names.append("mtp.fc.weight")
    with changed(llama) as tensors:
        tensors |= {name: torch.ones(2) for name in (*names, *OLD_BUFFERS)}

    with pytest.warns(CheckpointWarning, match=r"3 tensors .*part of the saved model") as caught:
        check_weights(llama, survey(llama))

    assert all(name in str(caught[0].message) for name in names)
    assert not any(name in str(caught[0].message) for name in OLD_BUFFERS)


def test_buffers_that_old_files_have_are_ignored_without_a_warning(llama: Path) -> None:
    with changed(llama) as tensors:
        tensors |= {name: torch.ones(2) for name in OLD_BUFFERS}
    check_weights(llama, survey(llama))  # a warning is an error


def test_a_tensor_under_two_names_is_refused(llama: Path) -> None:
    with changed(llama) as tensors:
        tensors[UP.removeprefix("model.")] = tensors[UP].clone()
    with pytest.raises(UnsupportedModelError, match=r"twice, as .* and as"):
        open_weights(llama)


# Buffers that are part of the model.


def apertus(folder: Path) -> Any:
    config = transformers.ApertusConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = plain_model(config)
    for index, layer in enumerate(model.model.layers):
        layer.mlp.act_fn.beta.fill_(0.25 + index)
    model.save_pretrained(folder)
    return model


def test_buffers_are_read_and_saved(tmp_path: Path) -> None:
    model = apertus(tmp_path / "model")
    saved = tmp_path / "saved"
    saved.mkdir()

    with prepare(tmp_path / "model", **RESIDENT) as engine:
        engine.write(saved)

    (saved / "config.json").write_bytes((tmp_path / "model" / "config.json").read_bytes())
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        saved, dtype=BF16, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_file_without_a_buffer_keeps_the_value_of_the_class_and_warns(tmp_path: Path) -> None:
    apertus(tmp_path)
    with changed(tmp_path) as tensors:
        for name in [n for n in tensors if n.endswith("act_fn.beta")]:
            del tensors[name]
    with pytest.warns(CheckpointWarning, match=r"lack 2 buffers .*0\.mlp\.act_fn\.beta"):
        check_weights(tmp_path, survey(tmp_path))


def test_a_buffer_of_another_shape_is_refused(tmp_path: Path) -> None:
    apertus(tmp_path)
    with changed(tmp_path) as tensors:
        tensors["model.layers.0.mlp.act_fn.beta"] = torch.ones(3)
    with pytest.raises(UnsupportedModelError, match=r"act_fn\.beta has shape \(3,\)"):
        open_weights(tmp_path)


def test_another_shape_is_named_with_its_file(llama: Path) -> None:
    with changed(llama) as tensors:
        tensors[UP] = tensors[UP][:-1].clone()
    with pytest.raises(UnsupportedModelError, match=rf"model.safetensors: {UP} has shape"):
        open_weights(llama)


def test_integers_are_refused(llama: Path) -> None:
    with changed(llama) as tensors:
        tensors[UP] = tensors[UP].to(torch.int8)
    with pytest.raises(TensorMismatchError, match=f"{UP}: expected BF16, F16 or F32.* I8"):
        open_weights(llama)


# Names that transformers maps when it loads a model.


def neox() -> Any:
    config = transformers.GPTNeoXConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    return plain_model(config)


def save_renamed(model: Any, folder: Path, rename: Any, **more: torch.Tensor) -> None:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tensors = {rename(n): t.clone() for n, t in model.state_dict().items()}
    save_file({k: v for k, v in tensors.items() if k} | more, folder / "model.safetensors")


def test_the_head_of_pythia_has_another_name_in_its_files(tmp_path: Path) -> None:
    model = neox()
    buffers = {
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(4),
        "gpt_neox.layers.0.attention.masked_bias": torch.ones(1),
    }
    save_renamed(model, tmp_path, lambda n: n.replace("lm_head.", "embed_out."), **buffers)

    read = read_all(tmp_path)

    assert torch.equal(read["lm_head.weight"], model.state_dict()["lm_head.weight"])
    assert set(read) == {name for name, _ in model.named_parameters()}


def test_gpt2_has_no_prefix_in_its_files(tmp_path: Path) -> None:
    model = plain_model(tiny_config("gpt2", tie_word_embeddings=True))
    save_renamed(
        model, tmp_path, lambda n: n.removeprefix("transformer.").replace("lm_head.weight", ""),
        **{"h.0.attn.bias": torch.ones(1, 1, 4, 4)},
    )  # fmt: skip

    read = read_all(tmp_path)

    for name, tensor in model.named_parameters():
        assert torch.equal(read[name], tensor), name


# Tied tensors that the files have twice.


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_copy_of_a_tied_tensor_is_accepted_only_if_it_is_equal(
    tmp_path: Path, family: str
) -> None:
    model = plain_model(tiny_config(family, tie_word_embeddings=True))
    save_renamed(model, tmp_path, lambda name: name)
    open_weights(tmp_path)

    with changed(tmp_path) as tensors:
        tensors["lm_head.weight"][-1, -1] += 1
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight differs from"):
        open_weights(tmp_path)


def test_a_tied_tensor_may_have_only_its_other_name(tmp_path: Path) -> None:
    model = plain_model(tiny_config("llama", tie_word_embeddings=True))
    save_renamed(model, tmp_path, lambda n: n.replace("model.embed_tokens.weight", ""))

    read = read_all(tmp_path)["model.embed_tokens.weight"]

    assert torch.equal(read, model.model.embed_tokens.weight)


def test_closed_weights_hold_no_file_open(llama: Path) -> None:
    weights = ModelWeights(llama, survey(llama), BF16)
    held = open_files(llama)
    weights.close()
    assert len(held) >= 1
    assert not open_files(llama)


def open_files(folder: Path) -> list[str]:
    """Return the files below a directory that this process has open."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [target for target in links if target.startswith(f"{folder}/")]
