"""Attention over rows of different lengths: every implementation gives exact attention.

The flash kernel runs on GPUs only. Here plain torch with the same contract replaces its one call,
so that its arguments (views, starts, lengths, windows) are tested without a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.generate import attention
from penstock.kv.errors import KvWarning
from penstock.model.attention import attending_over

HEADS, SHARED, HEAD, SLOT = 4, 2, 8, 40
LAYERS = 3


def make_rows(count: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """Make keys and values of all layers in the cache's layout."""
    generator = torch.Generator().manual_seed(7)
    data = torch.randn(count, SLOT, LAYERS, 2, SHARED, HEAD, generator=generator)
    return data.to(device, dtype)


def exact_attention(
    query: torch.Tensor, data: torch.Tensor, lengths: list[int], window: int | None,
    softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """Compute attention by its definition, query by query."""
    count, heads, new, head = query.shape
    out = torch.empty(count, new, heads, head, dtype=torch.float64)
    for row, length in enumerate(lengths):
        for at in range(new):
            end = length + at + 1
            first = 0 if window is None else max(0, end - window)
            for which in range(heads):
                keys, values = (
                    data[row, first:end, 1, :, which // (heads // SHARED)].double().unbind(1)
                )
                scores = keys @ query[row, which, at].double() * 0.3
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                out[row, at, which] = torch.softmax(scores, 0) @ values
    return out


def views(data: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (data[:, :longest, 1, which].transpose(1, 2) for which in (0, 1))
    return keys, values


def attend(data: torch.Tensor, lengths: list[int], new: int, **more: Any) -> Any:
    generator = torch.Generator().manual_seed(11)
    query = torch.randn(len(lengths), HEADS, new, HEAD, generator=generator).to(data)
    for row, length in enumerate(lengths):
        data[row, length + new :] = float("nan")  # nothing was written there
    keys, values = views(data, max(lengths) + new)
    with attending_over(attention.RowLengths(tuple(lengths), new)):
        actual, _ = attention.attend(
            torch.nn.Module(), query, keys, values, None, scaling=0.3, **more
        )
    return query, actual


CASES = [
    ([5], 1),
    ([5], 7),
    ([0], 9),
    ([12, 12, 12], 1),
    ([12, 12], 5),
    ([0, 0], 6),
    ([3, 20, 11], 1),
    ([3, 20, 11], 4),
    ([0, 9], 3),
]


@pytest.fixture
def flash_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Replace the flash kernel by plain torch; record for each call whether rows were ragged."""
    calls: list[bool] = []

    def kernel(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, queries: Any, starts: Any,
        used: Any, *, sizes: tuple[int, int], causal: bool, left: int, scaling: float | None,
    ) -> torch.Tensor:  # fmt: skip
        calls.append(queries is not None)
        assert all(t.stride(-1) == 1 for t in (query, key, value))
        if queries is None:
            parts = zip(query, key, value, strict=True)
        else:
            assert {t.dtype for t in (queries, starts, used)} == {torch.int32}
            assert int(used.max()) <= sizes[1]
            spans = zip(queries.tolist(), starts.tolist(), used.tolist(), strict=False)
            parts = (  # type: ignore[assignment]
                (query[q : q + sizes[0]], key[k : k + n], value[k : k + n]) for q, k, n in spans
            )
        actual = [_attend_row(*part, causal, left, scaling) for part in parts]
        return torch.stack(actual) if queries is None else torch.cat(actual)

    monkeypatch.setattr(attention, "flash_forward", kernel)
    monkeypatch.setattr(attention, "flash_fits", lambda *_: True)
    return calls


def _attend_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, left: int,
    scaling: float | None,
) -> torch.Tensor:  # fmt: skip
    at = torch.arange(len(query))[:, None] + len(key) - len(query)
    seen = torch.arange(len(key))[None, :]
    mask = (seen <= at) if causal else torch.ones(len(query), len(key), dtype=torch.bool)
    if left >= 0:
        mask &= seen >= at - left
    one, keys, values = (t.transpose(0, 1) for t in (query, key, value))
    actual = torch.nn.functional.scaled_dot_product_attention(
        one, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
    )
    return actual.transpose(0, 1)


@pytest.mark.parametrize("window", [None, 4, 100])
@pytest.mark.parametrize(("lengths", "new"), CASES)
def test_flash_gets_the_right_rows(
    lengths: list[int], new: int, window: int | None, flash_calls: list[bool]
) -> None:
    data = make_rows(len(lengths))
    query, actual = attend(data, lengths, new, sliding_window=window)

    torch.testing.assert_close(actual, exact_attention(query, data, lengths, window, None).float())
    ragged = len(set(lengths)) > 1
    assert flash_calls == [ragged] or (lengths[0] == 0 and not ragged)


@pytest.fixture
def cudnn_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Replace cuDNN by plain torch; record the number of keys of each call, and whether causal."""
    calls: list[tuple[int, bool]] = []

    def part(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, *,
        causal: bool,
    ) -> attention.AttentionPart:  # fmt: skip
        calls.append((key.shape[2], causal))
        keys, values = (t.repeat_interleave(HEADS // SHARED, 1) for t in (key, value))
        scores = query @ keys.transpose(2, 3) * scaling
        if causal:
            later = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        return scores.softmax(-1) @ values, scores.logsumexp(-1)

    monkeypatch.setattr(attention, "cudnn_part", part)
    monkeypatch.setattr(attention, "cudnn_fits", lambda query: query.shape[2] > 1)
    return calls


@pytest.mark.parametrize("window", [None, 4, 100])
@pytest.mark.parametrize(("lengths", "new"), CASES)
def test_a_later_chunk_is_computed_in_two_parts(
    lengths: list[int], new: int, window: int | None,
    flash_calls: list[bool], cudnn_calls: list[tuple[int, bool]],
) -> None:  # fmt: skip
    data = make_rows(len(lengths))
    query, actual = attend(data, lengths, new, sliding_window=window)

    torch.testing.assert_close(actual, exact_attention(query, data, lengths, window, None).float())
    even = len(set(lengths)) == 1
    if even and lengths[0] > 0 and new > 1 and window != 4:
        assert cudnn_calls == [(lengths[0], False), (new, True)]
        assert not flash_calls
    else:
        assert not cudnn_calls


def test_flash_replaces_cudnn_after_a_failure(
    flash_calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> attention.AttentionPart:
        raise RuntimeError("no execution plans support the graph")

    monkeypatch.setattr(attention, "cudnn_part", refuse)
    monkeypatch.setattr(attention, "_cudnn_failures", set())
    monkeypatch.setattr(attention, "cudnn_fits", lambda _: not attention._cudnn_failures)
    data = make_rows(1)
    with pytest.warns(KvWarning, match="no execution plans"):
        query, actual = attend(data, [5], 7)

    torch.testing.assert_close(actual, exact_attention(query, data, [5], None, None).float())
    attend(data, [5], 7)  # cuDNN is not tried again
    assert flash_calls == [False, False]


def test_running_out_of_memory_does_not_disable_cudnn(
    flash_calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> attention.AttentionPart:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(attention, "cudnn_part", full)
    monkeypatch.setattr(attention, "cudnn_fits", lambda _: True)
    with pytest.raises(torch.OutOfMemoryError):
        attend(make_rows(1), [5], 7)
    assert not attention._cudnn_failures


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
def test_cudnn_gives_exact_attention_in_two_parts(rows: int) -> None:
    """Keys are strided as in the cache; the result is that of attention row by row."""
    generator = torch.Generator("cuda").manual_seed(3)
    held, new = 1536, 1024
    data = torch.randn(
        rows,
        held + new + 64,
        2,
        2,
        8,
        128,
        generator=generator,
        device="cuda",
        dtype=torch.bfloat16,
    )
    query = torch.randn(
        rows, new, 32, 128, generator=generator, device="cuda", dtype=torch.bfloat16
    ).transpose(1, 2)
    keys, values = (data[:, :, 1, at].transpose(1, 2) for at in (0, 1))
    assert attention.cudnn_fits(query)

    actual = attention.attend_in_two_parts(query, keys, values, held, None)

    one = attention.RowAttention(attention.RowLengths((held,) * rows, new), None, None, None)
    expected = one.by_rows(query.float(), keys.float(), values.float())
    assert actual is not None
    torch.testing.assert_close(actual.float(), expected, atol=4e-3, rtol=2e-2)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("lengths", "new"), CASES)
def test_attention_row_by_row_is_exact(
    lengths: list[int], new: int, window: int | None, softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(attention, "BAND", 3)  # several bands, the last one shorter
    data = make_rows(len(lengths))
    query, actual = attend(data, lengths, new, sliding_window=window, softcap=softcap)

    torch.testing.assert_close(
        actual, exact_attention(query, data, lengths, window, softcap).float()
    )


def test_a_row_does_not_depend_on_other_rows() -> None:
    data = make_rows(3)
    _, together = attend(data.clone(), [3, 20, 11], 2)
    _, alone = attend(data[:1].clone(), [3], 2)

    assert torch.equal(together[:1], alone)


def test_keys_and_values_are_not_copied(
    flash_calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, seen = make_rows(2), []
    original = attention.flash_forward

    def watched(query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        seen.extend([key, value])
        return original(query, key, value, *rest, **more)

    monkeypatch.setattr(attention, "flash_forward", watched)
    attend(data, [9, 4], 1)
    attend(data, [9, 9], 1)

    pointers = {t.untyped_storage().data_ptr() for t in seen}
    assert pointers == {data.untyped_storage().data_ptr()}
    assert len(seen) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("lengths", "new"), CASES)
def test_the_flash_kernel_gives_exact_attention(
    lengths: list[int], new: int, window: int | None
) -> None:
    """bf16 has eight bits: results are rounded, and so are the weights inside the kernel."""
    data = make_rows(len(lengths), "cuda", torch.bfloat16)
    query, actual = attend(data, lengths, new, sliding_window=window)

    exact = exact_attention(query.cpu(), data.cpu(), lengths, window, None)
    torch.testing.assert_close(actual.cpu().double(), exact, atol=2e-2, rtol=2e-2)
