"""Models that would mix packed documents train on one document per row."""

from __future__ import annotations

from pathlib import Path

import transformers

from tests.support.small_tokenizers import MARKED, small_tokenizer
from tests.train.runs import RESIDENT, make_texts, run_command


def test_a_model_with_convolutions_trains_unpacked(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(MARKED)
    config = transformers.Lfm2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, layer_types=["conv", "full_attention"],
        pad_token_id=0, bos_token_id=1, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = tmp_path / "model"
    transformers.Lfm2ForCausalLM(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    data = make_texts(tmp_path / "texts.jsonl", 12)

    result = run_command(
        ["train", str(model), "--data", str(data), "--out", str(tmp_path / "out"),
         "--cache", str(tmp_path / "cache"), "--context", "32", "--batch", "4", "--steps", "2",
         "--json", *RESIDENT]
    )  # fmt: skip

    assert result.code == 0, result.errors
    assert len(result.losses) == 2
    assert "one document per sequence" in result.output + result.errors
