"""Generate text for many prompts with continuous batching and a paged KV cache, without a GPU.

    python examples/generate.py

The model has random weights, so the text means nothing: the script shows that the tokens are those
of `model.generate`, and how much memory the cache takes. With a trained model, pass it and its
tokenizer to `Generator`, or use `penstock generate`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.generate import Generator, Request
from penstock.kv import VirtualCache


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def main(argv: Sequence[str] | None = None) -> dict[int, list[int]]:
    """Generate for all prompts, compare with transformers, and return the tokens of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new", type=int, default=48)
    options = parser.parse_args(argv)
    model = make_model()
    prompts = [list(f"Prompt {n}: ".encode()) + [97 + n % 26] * n for n in range(options.prompts)]

    answers: dict[int, list[int]] = {n: [] for n in range(len(prompts))}
    requests = [
        Request(prompt=prompt, id=n, max_new=options.new) for n, prompt in enumerate(prompts)
    ]
    with Generator(model, budget="64MiB", max_batch=4) as generator:
        for chunk in generator.run(requests):  # four at a time; a finished one makes room
            answers[int(chunk.request)] += chunk.tokens
    print(f"{len(answers)} answers, {sum(map(len, answers.values())):,} tokens")

    # The cache also works with transformers' own generation.
    shortest = torch.tensor([prompts[0]])
    with VirtualCache(model.config, max_batch=1, max_context=512, budget="16MiB",
                      dtype=model.dtype) as cache:  # fmt: skip
        output = model.generate(
            shortest, attention_mask=torch.ones_like(shortest), past_key_values=cache,
            max_new_tokens=options.new, do_sample=False,
        )  # fmt: skip
    theirs = output[0, shortest.shape[1] :].tolist()
    print(f"transformers with Penstock's cache gives the same tokens: {theirs == answers[0]}")
    return answers


if __name__ == "__main__":
    main()
