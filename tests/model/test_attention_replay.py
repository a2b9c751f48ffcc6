"""Saved results of attention are returned again, and backward uses them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.model import varlen_attention
from penstock.model.attention_replay import Results, handling_attention
from penstock.model.attention_sizes import attention_result_nbytes
from penstock.model.varlen_attention import attend_packed, flatten_bounds
from tests.model.test_varlen_attention import BOUNDS, CPU, make_inputs

DOCUMENTS = flatten_bounds(BOUNDS, CPU)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return attend_packed(query, key, value, DOCUMENTS, scale=None, window=6, softcap=3.0)


class Tape:
    """Records the results of a call, or returns copies of recorded ones."""

    def __init__(self, saved: Results | None = None) -> None:
        self.saved, self.replays = saved, saved is not None

    def __call__(self, query: torch.Tensor, compute: Callable[[], Results]) -> Results:
        if self.replays:
            assert self.saved is not None
            out, sums = self.saved
            return out.clone(), sums.clone()
        made = compute()
        self.saved = (made[0].clone(), made[1].clone())
        return made


def gradients(function: Any, tape: Tape | None) -> tuple[torch.Tensor, ...]:
    tensors = make_inputs()
    if tape is None:
        out = function(*tensors)
    else:
        with handling_attention(tape):
            out = function(*tensors)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return out.detach(), *torch.autograd.grad((out * weight).sum(), tensors)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count how often attention's forward is computed."""
    calls: list[int] = []
    original = varlen_attention._compute_on_cpu

    def counted(query: torch.Tensor, *args: Any) -> Results:
        calls.append(query.shape[0])
        return original(query, *args)

    monkeypatch.setattr(varlen_attention, "_compute_on_cpu", counted)
    return calls


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_replay_computes_nothing_and_has_the_same_output_and_gradients(
    backend: str | None, computed: list[int]
) -> None:
    torch._dynamo.reset()
    function: Any = attend if backend is None else torch.compile(attend, backend=backend)
    plain = gradients(function, None)
    tape = Tape()
    recorded = gradients(function, tape)
    before = len(computed)
    assert before == 2

    replayed = gradients(function, Tape(tape.saved))

    assert len(computed) == before
    for results in (recorded, replayed):
        assert all(torch.equal(a, b) for a, b in zip(plain, results, strict=True))


def test_a_replay_returns_what_was_saved_and_backward_differentiates_with_it() -> None:
    tape = Tape()
    plain = gradients(attend, tape)
    assert tape.saved is not None
    out, sums = tape.saved

    changed = gradients(attend, Tape((out + 1, sums)))

    assert torch.equal(changed[0], plain[0] + 1)
    assert not torch.equal(changed[1], plain[1])


def test_other_threads_and_later_calls_are_not_handled(computed: list[int]) -> None:
    tape = Tape()
    with handling_attention(tape):
        thread = threading.Thread(target=attend, args=make_inputs())
        thread.start()
        thread.join()
        assert tape.saved is None
    attend(*make_inputs())

    assert tape.saved is None
    assert len(computed) == 2


def test_sizes_are_those_of_the_results() -> None:
    tape = Tape()
    gradients(attend, tape)
    assert tape.saved is not None

    nbytes = attention_result_nbytes(tokens=32, query_width=32, heads=4, element=4)

    assert nbytes == sum(t.numel() * t.element_size() for t in tape.saved)
