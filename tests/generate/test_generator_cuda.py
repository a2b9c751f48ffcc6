"""Generation on a GPU. fp32 gives the tokens of transformers; bf16 may choose another token where
two are within rounding of each other, which is checked against the scores of the model itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.generate.generator import Generator
from penstock.generate.streamed_forward import stream_model
from penstock.model.survey import survey_config
from tests.kv.generating import FAMILIES, alone, model_of, prompts_of, run

pytestmark = pytest.mark.gpu

LENGTHS = (1, 5, 17, 30, 9, 41)


def on_gpu(family: str, dtype: torch.dtype) -> Any:
    return copy.deepcopy(model_of(family)).to("cuda", dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_tokens_are_those_of_the_cpu(family: str) -> None:
    prompts = prompts_of(LENGTHS)
    expected = [alone(model_of(family), prompt, 24) for prompt in prompts]
    with Generator(
        on_gpu(family, torch.float32), budget="64MiB", max_batch=4, prefill_chunk=16
    ) as generator:
        assert run(generator, prompts, 24) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_tokens_are_the_likeliest_up_to_rounding(family: str) -> None:
    """Scores here are up to 8: bf16 has steps of 1/32 there, and a few of them add up on the way
    through three layers."""
    model, prompts = on_gpu(family, torch.bfloat16), prompts_of(LENGTHS)
    with Generator(model, budget="64MiB", max_batch=4, prefill_chunk=16) as generator:
        answers = run(generator, prompts, 24)
    exact = model_of(family)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            scores = exact(ids).logits[0, len(prompt) - 1 : -1]
        taken = scores.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert float((scores.max(dim=-1).values - taken).max()) < 0.5


@pytest.mark.parametrize("keep", [0, 120_000])
def test_streamed_tokens_are_the_same(keep: int, tmp_path: Path) -> None:
    model, prompts = model_of("llama"), prompts_of(LENGTHS)
    expected = [alone(model, prompt, 16) for prompt in prompts]
    model.save_pretrained(tmp_path)
    surveyed = survey_config(model.config, name="llama")
    forward = stream_model(
        model.config, surveyed, tmp_path, dtype=torch.float32, keep=keep, device="cuda"
    )
    with Generator(forward, budget="64MiB", max_batch=4, prefill_chunk=16) as generator:
        assert run(generator, prompts, 16) == expected
