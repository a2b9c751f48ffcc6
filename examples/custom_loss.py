"""Train with a loss of your own in a plain PyTorch loop, while the weights stream, without a GPU.

    python examples/custom_loss.py

`penstock.stream` returns a model and an optimizer that are used like any others. The loss here is
distillation: a small model learns the distribution of a teacher, which is computed under
`torch.no_grad()`. Every other loss that backpropagates from logits works in the same way.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import kl_div, log_softmax
from transformers import LlamaConfig, LlamaForCausalLM

import penstock as ps

VOCABULARY, LENGTH, ROWS = 256, 64, 4
TEXT = "Water runs down the pipe to the turbine. "


def make_model(layers: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=352, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=LENGTH, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batches(steps: int) -> Iterator[torch.Tensor]:
    """Yield rows of bytes; every byte is a token."""
    source = torch.tensor(list((TEXT * 8).encode()))
    starts = torch.randint(len(source) - LENGTH, (steps, ROWS), generator=torch.manual_seed(0))
    for row_starts in starts:
        yield torch.stack([source[start : start + LENGTH] for start in row_starts])


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Distil the teacher, and return the loss of each step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(argv)
    teacher = make_model(layers=6, seed=1).eval()
    model, optimizer = ps.stream(
        make_model(layers=3, seed=2),
        tokens=ROWS * LENGTH,  # the most tokens of one call
        budget={"hbm": "64MiB", "dram": "64MiB"},
        lr=3e-3,
        device="cpu",
    )
    losses = []
    try:
        for step, input_ids in enumerate(batches(options.steps), 1):
            with torch.no_grad():
                target = log_softmax(teacher(input_ids).logits, dim=-1)
            found = log_softmax(model(input_ids=input_ids).logits.float(), dim=-1)
            loss = kl_div(found, target, log_target=True, reduction="none").sum(-1).mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step % 10 == 0 or step == options.steps:
                print(f"step {step:3} KL divergence {losses[-1]:.4f}, gradient norm {norm:.3f}")
    finally:
        model.close()  # gives the model its trained weights back
    return losses


if __name__ == "__main__":
    main()
