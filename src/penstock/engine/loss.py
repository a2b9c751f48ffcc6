"""The loss over the head, one chunk of tokens at a time, and the loss scale of fp16.

The logits of a whole batch never exist: those of each chunk are computed, compared with the
targets, differentiated and dropped before the next chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional

from penstock.engine.gradients import differentiate
from penstock.errors import EngineError, LossScaleError

IGNORE_INDEX = -100
"""Label of tokens that do not count for the loss, as in Hugging Face and torch."""

GROWTH_INTERVAL = 2000
"""Number of steps without overflow after which the loss scale is doubled."""

LOWEST_SCALE = 1.0
"""The loss scale is not halved below this: gradients that overflow then do so by themselves."""

MOST_OVERFLOWS = 10
"""Number of overflows in a row at the lowest scale after which training ends with an error. One
bad batch, or a few, may overflow and be skipped; a model that always overflows learns nothing."""


class LossFunction(Protocol):
    """Returns the sum of the loss over tokens from the log-probabilities of their targets."""

    def __call__(self, log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor: ...


def next_targets(labels: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Return what each token must predict: the next label, unless a document starts there."""
    targets = torch.full_like(labels, IGNORE_INDEX)
    following = torch.where(position_ids[:, 1:] == 0, IGNORE_INDEX, labels[:, 1:])
    targets[:, :-1] = following
    return targets


def count_targets(targets: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens that have a target, on the device that has them."""
    return (targets != IGNORE_INDEX).sum()


@dataclass(frozen=True, slots=True)
class TokenValues:
    """What a step says about each token of a micro-batch besides its loss, on the device."""

    entropy: torch.Tensor
    """Entropy of the predicted distribution, in nats."""
    is_top: torch.Tensor
    """1 if the target is the most likely token, otherwise 0."""

    @classmethod
    def empty(cls, tokens: int, device: torch.device) -> TokenValues:
        """Allocate the values of so many tokens: eight bytes each."""
        values = torch.empty(2, tokens, dtype=torch.float32, device=device)
        return cls(values[0], values[1])

    def fill(self, rows: slice, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Compute the values of a chunk from its logits, a few tokens at a time."""
        few = max(1, _VALUES_NBYTES // (4 * logits.shape[1]))
        for low in range(0, logits.shape[0], few):
            part = logits[low : low + few].detach()
            into = slice(rows.start + low, rows.start + low + part.shape[0])
            self.is_top[into] = part.argmax(-1) == targets[low : low + few]
            self.entropy[into] = torch.special.entr(part.float().softmax(-1)).sum(-1)


_VALUES_NBYTES = 16 << 20
"""Maximum size of a tensor that `TokenValues.fill` allocates, unless one token needs more."""


class GradientSink(NamedTuple):
    """The head's parameters, and the function that receives their gradients.

    The function must copy or add a gradient: its memory is freed when the function returns.
    """

    parameters: Mapping[str, torch.Tensor]
    add: Callable[[str, torch.Tensor], None]


class ChunkedLoss:
    """Computes the loss and its gradient chunk by chunk."""

    def __init__(
        self,
        logits: Callable[[torch.Tensor], torch.Tensor],
        chunk: int,
        function: LossFunction | None = None,
        *,
        fused: bool = False,
        label_smoothing: float = 0.0,
    ) -> None:
        assert function is None or not (fused or label_smoothing)
        self._logits, self._chunk, self._function, self._fused = logits, chunk, function, fused
        self._smoothing = label_smoothing

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, values: TokenValues | None = None
    ) -> torch.Tensor:
        """Return the sum of the loss over tokens that have a target, in fp64.

        `values`, if given, are filled in.
        """
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        with torch.no_grad():
            for rows in self._chunks(hidden):
                total += self._loss_sum(hidden[rows], targets[rows], rows, values)
        return total

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of all tokens on the host, moved there one chunk at a time."""
        with torch.no_grad():
            return torch.cat([self._logits(hidden[rows]).cpu() for rows in self._chunks(hidden)])

    def backward(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        sink: GradientSink,
        num_items: int,
        scale: float,
        values: TokenValues | None = None,
    ) -> torch.Tensor:
        """Return the sum of the loss, and replace the hidden states by their gradient.

        The gradient is that of `scale * sum / num_items`. It is written in place, chunk by chunk: a
        chunk's hidden states are not needed after its gradient exists. `values`, if given, are
        filled in.
        """
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for rows in self._chunks(hidden):
            total += self._differentiate(
                hidden[rows], targets[rows], sink, num_items, scale, rows, values
            )
        return total

    # Each chunk is a call of its own. In a loop, variables such as the logits would keep a chunk's
    # memory until the next chunk's logits replace them, and two chunks would exist at the peak.

    def _loss_sum(
        self, hidden: torch.Tensor, targets: torch.Tensor, rows: slice, values: TokenValues | None
    ) -> torch.Tensor:
        if self._fused:
            logits = self._logits_of(hidden, targets, rows, values)
            return fused_loss(logits, targets, None, self._smoothing)
        return self._torch_loss(self._logits_of(hidden, targets, rows, values), targets).double()

    def _logits_of(
        self, hidden: torch.Tensor, targets: torch.Tensor, rows: slice, values: TokenValues | None
    ) -> torch.Tensor:
        """Return a chunk's logits, after the values of its tokens were filled in."""
        logits = self._logits(hidden)
        if values is not None:
            # The head's backward, which follows, needs more memory than this.
            values.fill(rows, logits, targets)
        return logits

    def _differentiate(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        sink: GradientSink,
        num_items: int,
        scale: float,
        rows: slice,
        values: TokenValues | None,
    ) -> torch.Tensor:
        """Return the sum of one chunk's loss, and replace its hidden states by their gradient."""
        x = hidden.detach().requires_grad_()
        gradient: torch.Tensor | None = None
        with torch.enable_grad():
            if self._fused:
                # The kernel overwrites the logits with their gradient, which then flows back
                # through the head. `data`, not `detach()`, which shares the version counter: the
                # logits may be a view, and autograd differentiates a view that was changed in
                # place through a tensor of zeros as large as the logits.
                out = self._logits_of(x, targets, rows, values)
                gradient = out.data
                loss_sum = fused_loss(gradient, targets, scale / num_items, self._smoothing)
            else:
                loss_sum = self._torch_loss(self._logits_of(x, targets, rows, values), targets)
                out = loss_sum / num_items
                out = out * scale if scale != 1.0 else out
        differentiate(out, gradient, x, sink.parameters, sink.add, into=hidden)
        return loss_sum.detach().double()

    def _chunks(self, hidden: torch.Tensor) -> Iterator[slice]:
        for low in range(0, hidden.shape[0], self._chunk):
            yield slice(low, low + self._chunk)

    def _torch_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        if self._function is None:
            return functional.cross_entropy(
                logits, targets,
                ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=self._smoothing,
            )  # fmt: skip
        trained = targets != IGNORE_INDEX
        indices = targets.clamp(min=0)[:, None]
        log_probs = logits.log_softmax(dim=-1).gather(1, indices)[:, 0]
        loss_sum = self._function(log_probs[trained], targets[trained])
        if loss_sum.shape != ():
            raise EngineError(
                f"the loss function returned a tensor of shape {tuple(loss_sum.shape)}; it must "
                f"return a scalar, the sum of the loss over the tokens that it gets"
            )
        return loss_sum


def fused_loss(
    logits: torch.Tensor, targets: torch.Tensor, scale: float | None, smoothing: float = 0.0
) -> torch.Tensor:
    """Return the sum of the cross-entropy of contiguous rows, by one Triton kernel.

    With a scale, the logits are overwritten by `scale` times their gradient. `smoothing` is the
    `label_smoothing` of `torch.nn.functional.cross_entropy`. The only memory it allocates is four
    bytes per row.
    """
    assert logits.is_contiguous()
    factor = 0.0 if scale is None else scale
    losses: torch.Tensor = _cross_entropy(logits, targets, factor, smoothing)
    return losses.sum(dtype=torch.float64)


# An operation of torch's, so that it can also be traced with tensors that have no data.
@torch.library.custom_op("penstock::cross_entropy", mutates_args=("logits",))
def _cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, scale: float, smoothing: float
) -> torch.Tensor:
    """Return the loss of each row. With a scale above 0, replace logits by their gradient."""
    from penstock.engine.loss_kernels import cross_entropy_kernel

    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    kernel: Any = cross_entropy_kernel
    kernel[(rows,)](
        *(logits, targets, losses, vocabulary, scale),
        IGNORE_INDEX=IGNORE_INDEX,
        WRITE=scale > 0,
        SMOOTHING=smoothing,
        BLOCK=8192,
        num_warps=16,
        enable_fp_fusion=True,
    )
    return losses


@_cross_entropy.register_fake
def _cross_entropy_shape(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


@dataclass(slots=True)
class LossScale:
    """The loss scale that keeps small gradients inside the range of fp16, as in GradScaler.

    With bf16 and fp32, which have the range of fp32, the scale is always 1.
    """

    value: float = 1.0
    good_steps: int = 0
    """Number of steps without overflow since the value last changed."""
    fixed: bool = True
    overflows: int = 0
    """Number of overflows in a row at the lowest scale."""

    @classmethod
    def of(cls, dtype: str) -> LossScale:
        return cls(value=65536.0, fixed=False) if dtype == "fp16" else cls()

    def note_good_step(self) -> None:
        """Count a step without overflow; double the scale after enough of them."""
        if self.fixed:
            return
        self.overflows = 0
        self.good_steps += 1
        if self.good_steps >= GROWTH_INTERVAL:
            self.value, self.good_steps = self.value * 2, 0

    def note_overflow(self) -> None:
        """Halve the scale, down to 1. Raises LossScaleError if that has not helped for long."""
        if not self.fixed and self.value <= LOWEST_SCALE:
            self.overflows += 1
        self.value, self.good_steps = max(self.value / 2, LOWEST_SCALE), 0
        if self.overflows >= MOST_OVERFLOWS:
            raise LossScaleError(overflows=self.overflows, scale=self.value)
