"""Generation on a GPU.

In fp32 the tokens equal those of transformers. In bf16 another token may be chosen where the scores
of two differ by less than rounding, which is checked with the scores of the model itself.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.generate.generator import Generator
from penstock.generate.streamed_forward import stream_model
from penstock.model.survey import survey_config
from tests.kv.tiny_generators import FAMILIES, random_prompts, reference_tokens, run, tiny_model

pytestmark = pytest.mark.gpu

LENGTHS = (1, 5, 17, 30, 9, 41)


def on_gpu(family: str, dtype: torch.dtype) -> Any:
    return copy.deepcopy(tiny_model(family)).to("cuda", dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_tokens_equal_those_of_the_cpu(family: str) -> None:
    prompts = random_prompts(LENGTHS)
    expected = [reference_tokens(tiny_model(family), prompt, 24) for prompt in prompts]
    with Generator(
        on_gpu(family, torch.float32), budget="64MiB", max_batch=4, prefill_chunk=16
    ) as generator:
        assert run(generator, prompts, 24) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_tokens_are_the_likeliest_within_rounding(family: str) -> None:
    """Scores are up to 8, where bf16 has steps of 1/32. A few of them add up over three layers."""
    model, prompts = on_gpu(family, torch.bfloat16), random_prompts(LENGTHS)
    with Generator(model, budget="64MiB", max_batch=4, prefill_chunk=16) as generator:
        answers = run(generator, prompts, 24)
    exact = tiny_model(family)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            scores = exact(ids).logits[0, len(prompt) - 1 : -1]
        chosen = scores.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert float((scores.max(dim=-1).values - chosen).max()) < 0.5


@pytest.mark.parametrize("keep", [0, 120_000])
def test_streamed_weights_give_the_same_tokens(keep: int, tmp_path: Path) -> None:
    model, prompts = tiny_model("llama"), random_prompts(LENGTHS)
    expected = [reference_tokens(model, prompt, 16) for prompt in prompts]
    model.save_pretrained(tmp_path)
    surveyed = survey_config(model.config, name="llama")
    forward = stream_model(
        model.config, surveyed, tmp_path, dtype=torch.float32, keep=keep, device="cuda"
    )
    with Generator(forward, budget="64MiB", max_batch=4, prefill_chunk=16) as generator:
        assert run(generator, prompts, 16) == expected
