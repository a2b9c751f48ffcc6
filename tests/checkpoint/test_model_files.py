"""transformers loads a checkpoint's directory as a model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers import PreTrainedTokenizerFast as FastTokenizer

from penstock.checkpoint.errors import IncompleteModelFileError
from penstock.checkpoint.model_files import ModelFiles, copy_model_files, write_config
from penstock.checkpoint.reader import ShardReader
from penstock.checkpoint.run_directory import latest_checkpoint, new_checkpoint
from penstock.checkpoint.writer import ShardWriter
from tests.support.safetensors_files import read, same_bits, tensor_out


def tiny(*, tied: bool, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=tied,
    )
    model: LlamaForCausalLM = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


@pytest.mark.parametrize("limit", [10_000, 10**9])
@pytest.mark.parametrize(
    ("tied", "dtype"), [(False, torch.bfloat16), (True, torch.float16), (True, torch.float32)]
)
def test_transformers_loads_a_checkpoint(
    tmp_path: Path, tied: bool, dtype: torch.dtype, limit: int
) -> None:
    model = tiny(tied=tied, dtype=dtype)
    weights = dict(model.named_parameters())  # without a tied head
    outs = [tensor_out(name, w.detach(), 1000) for name, w in weights.items()]
    states = ShardWriter([tensor_out("exp_avg", torch.zeros(9))], stem="optimizer", private=True)
    with new_checkpoint(tmp_path, 1) as folder:
        ShardWriter(outs, max_shard_nbytes=limit).write(folder)
        states.write(folder)
        write_config(model.config, folder, dtype=dtype, architecture="LlamaForCausalLM")

    found = latest_checkpoint(tmp_path)
    assert found is not None
    loaded, info = AutoModelForCausalLM.from_pretrained(found.path, output_loading_info=True)
    assert type(loaded) is LlamaForCausalLM
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, weight in loaded.named_parameters():
        assert same_bits(weight.detach(), weights[name].detach()), name
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)


def test_files_written_by_transformers_are_read(tmp_path: Path) -> None:
    model = tiny(tied=False, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    with ShardReader(tmp_path) as reader:
        assert len(reader.files) > 2
        weights = dict(model.named_parameters())
        assert set(reader.names) == set(weights)
        for name, weight in weights.items():
            assert same_bits(read(reader, name), weight.detach())


def test_a_config_gets_the_dtype_of_the_weights_and_is_otherwise_unchanged(tmp_path: Path) -> None:
    config = tiny(tied=False, dtype=torch.float32).config
    config.dtype = torch.float32
    write_config(config, tmp_path, dtype=torch.bfloat16, architecture="LlamaForCausalLM")

    written = json.loads((tmp_path / "config.json").read_text())
    assert written["dtype"] == "bfloat16"
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert config.dtype == torch.float32
    assert LlamaConfig.from_pretrained(tmp_path).intermediate_size == 48


def test_sub_configs_get_the_dtype_too(tmp_path: Path) -> None:
    from transformers import Gemma3Config

    config = Gemma3Config(text_config={"num_hidden_layers": 2})
    config.architectures = ["Gemma3ForConditionalGeneration"]
    write_config(config, tmp_path, dtype=torch.bfloat16, architecture="Other")

    written = json.loads((tmp_path / "config.json").read_text())
    assert written["text_config"]["dtype"] == "bfloat16"
    assert written["architectures"] == ["Gemma3ForConditionalGeneration"]


COPIED = {
    *("config.json", "generation_config.json", "chat_template.jinja", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "added_tokens.json"),
    "additional_chat_templates/tool.jinja",
}
NOT_COPIED = (
    *("modeling_own.py", "README.md", "model.safetensors", "pytorch_model.bin"),
    *("training_args.bin", "tokenizer_old/tokenizer.json"),
)


def make_source(folder: Path) -> Path:
    source, blobs = folder / "source", folder / "blobs"
    for path in (source / "additional_chat_templates", source / "tokenizer_old", blobs):
        path.mkdir(parents=True)
    vocabulary = {"<unk>": 0, "a": 1, "b": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    FastTokenizer(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(source)
    for name in (
        *COPIED - {"tokenizer.json", "tokenizer_config.json", "added_tokens.json"},
        *NOT_COPIED,
    ):
        (source / name).write_text("{}")
    (blobs / "1").write_text("{}")
    (source / "added_tokens.json").symlink_to(blobs / "1")  # as in a download cache
    return source


def test_config_tokenizer_and_templates_are_copied(tmp_path: Path) -> None:
    source = make_source(tmp_path)
    plain, trusted = tmp_path / "plain", tmp_path / "trusted"
    plain.mkdir()
    trusted.mkdir()

    assert set(copy_model_files(source, plain)) == COPIED
    assert set(copy_model_files(source, trusted, trust_remote_code=True)) == {
        *COPIED,
        "modeling_own.py",
    }
    assert not (plain / "added_tokens.json").is_symlink()
    assert set(os.listdir(plain)) == {name.split("/")[0] for name in COPIED}
    assert AutoTokenizer.from_pretrained(plain)("a")["input_ids"] == [1]


def test_existing_files_are_not_replaced(tmp_path: Path) -> None:
    source = make_source(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text('{"existing": 1}')

    assert "config.json" not in copy_model_files(source, folder)
    assert (folder / "config.json").read_text() == '{"existing": 1}'


def test_copied_links_become_regular_files_of_the_checkpoint(tmp_path: Path) -> None:
    source = make_source(tmp_path)
    with new_checkpoint(tmp_path / "out", 1) as folder:
        copy_model_files(source, folder)

    found = latest_checkpoint(tmp_path / "out")
    assert found is not None
    assert set(found.files) == COPIED


@pytest.mark.parametrize("content", [b"", b" \n", bytes(40), b'{"a": 1', b'"a": 1}'])
def test_an_incomplete_file_is_never_copied_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    """A power cut leaves files empty, filled with zeros, or cut off."""
    source, folder = tmp_path / "source", tmp_path / "folder"
    source.mkdir()
    folder.mkdir()
    (source / "tokenizer.json").write_bytes(content)
    with pytest.raises(
        IncompleteModelFileError, match=r"tokenizer.json: the file is empty or ends"
    ):
        copy_model_files(source, folder)
    assert os.listdir(folder) == []

    (source / "tokenizer.json").write_text('\ufeff{"a": 1}\n')
    (folder / "tokenizer.json").write_bytes(content)
    assert copy_model_files(source, folder) == ("tokenizer.json",)
    assert copy_model_files(source, folder) == ()
    assert os.listdir(folder) == ["tokenizer.json"]


def test_a_tokenizer_and_generation_defaults_are_written_with_the_config(tmp_path: Path) -> None:
    model = tiny(tied=False, dtype=torch.float32)
    tokenizer = FastTokenizer(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    tokenizer.chat_template = "{{ messages }}"
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    (source / "tokenizer_config.json").write_text('{"other": 1}')
    (source / "modeling_x.py").write_text("x = 1")
    files = ModelFiles(
        config=model.config, dtype=torch.float16, architecture="LlamaForCausalLM", source=source,
        generation_config=GenerationConfig(max_length=77),
    )  # fmt: skip
    files.write(target, tokenizer=tokenizer)

    assert json.loads((target / "generation_config.json").read_text())["max_length"] == 77
    assert AutoTokenizer.from_pretrained(target).chat_template == "{{ messages }}"
    assert "other" not in (target / "tokenizer_config.json").read_text()
    config = json.loads((target / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float16")
    assert not (target / "modeling_x.py").exists()
    assert copy_model_files(source, target, trust_remote_code=True) == ("modeling_x.py",)
