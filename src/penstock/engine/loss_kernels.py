# mypy: ignore-errors
# ruff: noqa: N803
"""A Triton kernel for cross-entropy and its gradient: two reads and one write of the logits.

One program handles one row from its first logit to its last, so a row's result depends on nothing
else.
"""

import triton
import triton.language as tl


@triton.jit
def cross_entropy_kernel(
    logits,
    targets,
    losses,
    vocabulary,
    scale,
    IGNORE_INDEX: tl.constexpr,
    WRITE: tl.constexpr,
    SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the loss of each row; with WRITE, replace logits by `scale` times their gradient.

    SMOOTHING is the share of the probability that every target spreads over the whole vocabulary.
    It is known to the compiler, so that a kernel without it has no trace of it.

    A target that is neither IGNORE_INDEX nor in the vocabulary gives a loss of NaN. The engine
    refuses such a batch on the host; here, nothing outside of the row may be read as its logit.
    """
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * vocabulary
    target = tl.load(targets + row)
    columns = tl.arange(0, BLOCK)
    top = -float("inf")
    total = 0.0
    logit_sum = 0.0
    for low in range(0, vocabulary, BLOCK):
        inside = low + columns < vocabulary
        x = tl.load(start + low + columns, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
        if SMOOTHING > 0:
            logit_sum += tl.sum(tl.where(inside, x, 0.0), 0)
    log_total = top + tl.log(total)
    trained = target != IGNORE_INDEX
    known = (target >= 0) & (target < vocabulary)
    picked = tl.load(start + target, mask=known, other=float("nan")).to(tl.float32)
    loss = log_total - picked
    if SMOOTHING > 0:
        loss = (1.0 - SMOOTHING) * loss + SMOOTHING * (log_total - logit_sum / vocabulary)
    tl.store(losses + row, tl.where(trained, loss, 0.0))
    if WRITE:
        factor = tl.where(trained, scale, 0.0)
        for low in range(0, vocabulary, BLOCK):
            inside = low + columns < vocabulary
            x = tl.load(start + low + columns, mask=inside, other=-float("inf")).to(tl.float32)
            wanted = tl.where(low + columns == target, 1.0 - SMOOTHING, 0.0)
            if SMOOTHING > 0:
                wanted += SMOOTHING / vocabulary
            gradient = (tl.exp(x - log_total) - wanted) * factor
            tl.store(start + low + columns, gradient.to(logits.dtype.element_ty), mask=inside)
