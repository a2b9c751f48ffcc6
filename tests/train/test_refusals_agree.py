"""`penstock plan` and `penstock train` refuse the same models, before memory is allocated.

A model that can be described but not trained gets a plan, which says why it cannot be trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import penstock.engine.engine as engine_module
from tests.conformance_models.tiny import tiny_config
from tests.support.small_tokenizers import MARKED, small_tokenizer
from tests.train.runs import RunResult, make_texts, run_command

SIZES = ("--context", "16", "--batch", "2")

REFUSED = {
    "phimoe": "draws random numbers in training in addition to dropout",
    "bart": "it is the decoder of an encoder-decoder model",
    "zamba": "its layers share parameters",
    "bamba": "its layers mix tokens with BambaMixer",
    "gemma4_text": "takes per_layer_input, which depends on trained tensors",
    "gemma4_unified_text": "passes tensors to other layers in shared_kv_states",
    "paligemma": "asks for attention to later tokens",
    "bert": "found no layers in BertLMHeadModel",
    "musicgen": "is an encoder-decoder model",
    "phi4_multimodal": "no text_config, so Penstock cannot separate its language model",
    "qwen2_vl": "no causal language model of the type 'qwen2_vl_text'",
    "aya_vision": "its logits are 16 times those of Cohere2ForCausalLM",
    "instructblip": "its forward requires pixel_values and qformer_input_ids",
    "evolla": "transformers cannot build a causal language model of type 'evolla'",
}
"""A model type for each kind of refusal, and a part of the reason."""

SAMPLE = ("bert", "gemma4_text", "instructblip")
"""Types that are not only part of `make test-long`."""


def said(result: RunResult) -> str:
    """Return everything that a command wrote, in one line."""
    return " ".join((result.output + result.errors).replace("\\n", " ").split())


@pytest.mark.parametrize(
    "family", [f if f in SAMPLE else pytest.param(f, marks=pytest.mark.long) for f in REFUSED]
)
def test_plan_and_train_refuse_a_model_with_the_same_reason(family: str, tmp_path: Path) -> None:
    model, data = tmp_path / "model", make_texts(tmp_path / "texts.jsonl", 8)
    tiny_config(family).save_pretrained(model)
    small_tokenizer(MARKED).save_pretrained(model)
    allocated: Any = mock.Mock(side_effect=AssertionError("memory was allocated"))

    with mock.patch.object(engine_module, "allocate", allocated):
        plan = run_command(["plan", str(model), *SIZES, "--machine", "desktop-24gb"])
        files = [str(model), "--data", str(data), "--out", str(tmp_path / "out")]
        train = run_command(["train", *files, *SIZES, "--hbm", "64MiB", "--dram", "64MiB"])

    reason = REFUSED[family]
    assert train.code != 0
    assert reason in said(train)
    assert not allocated.called
    assert reason in said(plan)
    assert "Traceback" not in said(plan) + said(train)
