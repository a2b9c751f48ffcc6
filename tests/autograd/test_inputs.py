"""The arguments of a streamed model's forward pass, as micro-batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.autograd.inputs import split_inputs
from penstock.autograd.model_masks import ModelMask
from penstock.errors import BatchError, UnsupportedModelError
from penstock.model.document_attention import PaddedRows, TwoWaySpans
from penstock.model.split import Features, MicroBatch
from tests.support.engines import workload

CPU = torch.device("cpu")


def model(**changes: Any) -> Any:
    """Return what is read of an inventory."""
    layer = SimpleNamespace(window=None)
    fields = {"model": "a model", "vocabulary": 50, "max_context": 16, "own_attention": False}
    return SimpleNamespace(**fields | {"mixes_documents": "", "layers": [layer]} | changes)


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.arange(rows * length).view(rows, length) % 50


def split(given: dict[str, Any], of: Any = None, **more: Any) -> list[MicroBatch]:
    """Split for micro-batches of 2 x 16 tokens, three of them."""
    work = workload(**{k: more.pop(k) for k in ("attention",) if k in more})
    return split_inputs(given, work, of or model(), CPU, **more)


def test_rows_fill_micro_batches_by_their_tokens() -> None:
    micros = split({"input_ids": ids(5, 10)})
    assert [m.input_ids.shape[0] for m in micros] == [3, 2]
    assert [m.number for m in micros] == [0, 1]
    assert torch.equal(torch.cat([m.input_ids for m in micros]), ids(5, 10))
    assert torch.equal(torch.cat([m.targets for m in micros]), ids(5, 10))
    assert micros[1].position_ids.tolist() == [list(range(10))] * 2
    assert [m.bounds for m in micros] == [None, None]
    assert len(split({"input_ids": ids(6, 16)})) == 3
    with pytest.raises(BatchError, match=r"takes 4 micro-batches of 2 rows.*tokens=128"):
        split({"input_ids": ids(7, 16)})
    with pytest.raises(BatchError, match=r"sequences of 17 tokens.*tokens=96, context=17"):
        split({"input_ids": ids(2, 17)})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "^a streamed model needs input_ids$"),
        ({"inputs_embeds": torch.zeros(1, 2, 3)}, "takes no inputs_embeds"),
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, r"must be \[sequences, tokens\]"),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.int64)}, r"got \(2, 0\)"),
        ({"input_ids": torch.zeros(1, 2)}, "must be a tensor of integers.*got torch.float32"),
        ({"input_ids": [[1, 2]]}, "must be a tensor of integers.*got list"),
        ({"input_ids": ids(1, 4), "past_key_values": object()}, "keeps no KV cache"),
        ({"input_ids": ids(1, 4), "output_attentions": True}, "output_attentions=True asks for"),
        ({"input_ids": ids(1, 4), "pixel_values": ids(1, 4)}, "the argument pixel_values; it uses"),
        ({"input_ids": ids(1, 4), "position_ids": ids(1, 3)}, r"shape \(1, 3\), but input_ids has"),
        ({"input_ids": ids(1, 4), "position_ids": ids(1, 4) - 1}, "positions from 0 to 15"),
        ({"input_ids": ids(1, 4), "position_ids": ids(1, 4) + 13}, "positions from 0 to 15"),
        ({"input_ids": ids(1, 4), "attention_mask": torch.ones(1, 5)}, r"shape of input_ids.*1, 5"),
        ({"input_ids": ids(1, 4), "attention_mask": "x"}, "shape of input_ids.*got str"),
        (
            {"input_ids": ids(1, 3), "attention_mask": torch.tensor([[1, 2, 0]])},
            "1 for tokens and 0 for padding",
        ),
    ],
)
def test_arguments_that_cannot_be_computed_are_refused(given: Any, problem: str) -> None:
    with pytest.raises(BatchError, match=problem):
        split(given)


def test_arguments_that_ask_for_nothing_are_taken() -> None:
    nothing = {"use_cache": True, "output_attentions": False, "return_dict": True, "labels": None}
    assert len(split({"input_ids": ids(1, 4), **nothing})) == 1


def test_positions_may_be_for_all_rows_and_have_no_limit_without_one() -> None:
    (micro,) = split({"input_ids": ids(2, 4), "position_ids": torch.arange(12, 16)})
    assert micro.position_ids.tolist() == [[12, 13, 14, 15]] * 2
    given = {"input_ids": ids(1, 2), "position_ids": torch.tensor([[5, 10**6]])}
    assert len(split(given, model(max_context=None))) == 1
    given["position_ids"] = torch.tensor([[-1, 0]])
    with pytest.raises(BatchError, match="positions of 0 or more"):
        split(given, model(max_context=None))


def test_documents_are_found_by_their_positions_unless_there_is_a_mask() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    given = {"input_ids": ids(2, 5), "position_ids": positions}
    (micro,) = split(given)
    assert micro.bounds == [[0, 3, 5], [0, 5]]
    (masked,) = split(given | {"attention_mask": torch.ones(2, 5)})
    assert masked.bounds is None
    later = split({"input_ids": ids(4, 15), "position_ids": torch.arange(15).repeat(4, 1) % 12})
    assert [m.bounds for m in later] == [[[0, 12, 15]] * 2] * 2
    with pytest.raises(UnsupportedModelError, match="a convolution would carry information"):
        split(given, model(mixes_documents="a convolution"))


def test_padding_on_the_left_is_known_for_each_row_and_on_the_right_ignored() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    given = {"input_ids": ids(2, 4), "attention_mask": mask}
    (micro,) = split(given)
    assert micro.bounds == PaddedRows([2, 0], 4)
    assert split(given | {"attention_mask": mask[1].repeat(2, 1)})[0].bounds is None
    assert split(given | {"attention_mask": torch.zeros(2, 4)})[0].bounds is None
    with pytest.raises(UnsupportedModelError, match="padding on the left is not supported"):
        split(given, model(own_attention=True))
    with pytest.raises(BatchError, match="hides a token between others"):
        split(given | {"attention_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])})


def test_kernels_for_documents_get_all_rows_as_one() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    given = {"input_ids": ids(2, 4), "attention_mask": mask}
    padded: Any = split(given, attention="varlen")[0].bounds
    assert padded.spans[0, :8].tolist() == [0, 0, 2, 2, 4, 4, 4, 4]
    assert padded.padding.tolist() == [[True, True, False, False], [False] * 4]
    plain: Any = split({"input_ids": ids(2, 4)}, attention="varlen")[0].bounds
    assert plain.spans[0, :8].tolist() == [0, 0, 0, 0, 4, 4, 4, 4]
    assert plain.padding is None


def test_images_come_with_their_rows_and_see_each_other() -> None:
    shown = torch.ones(4, 4, dtype=torch.bool).tril()
    shown[1:3, 1:3] = True
    given = {"input_ids": ids(3, 4), "attention_mask": ModelMask(shown.expand(3, 1, 4, 4), None)}
    embeddings = torch.arange(3.0).view(3, 1, 1).expand(3, 4, 2)
    features = Features(embeddings, torch.zeros(3, 4, dtype=torch.bool))
    (micro,) = split(given, features=features)
    assert micro.bounds == TwoWaySpans([[0, 4]] * 3, [0] * 3, [[(1, 3)]] * 3)
    many = split({"input_ids": ids(3, 16)}, features=features)
    assert [m.features.embeddings[:, 0, 0].tolist() for m in many if m.features] == [[0, 1], [2]]
    with pytest.raises(UnsupportedModelError, match="for which images are not supported"):
        split(given, model(own_attention=True))


def test_models_with_several_positions_take_them_and_one_more_for_documents() -> None:
    several = torch.arange(4).expand(3, 2, 4)
    (micro,) = split({"input_ids": ids(2, 4), "position_ids": several}, axes=3)
    assert micro.position_ids.shape == (3, 2, 4)
    assert micro.bounds is None
    first = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])
    packed = {"input_ids": ids(2, 4), "position_ids": torch.cat([first[None], several])}
    assert split(packed, axes=3)[0].bounds == [[0, 2, 4], [0, 4]]
    with pytest.raises(BatchError, match=r"takes \[3, 2, 4\], or \[4, 2, 4\]"):
        split({"input_ids": ids(2, 4), "position_ids": several[:2]}, axes=3)
    with pytest.raises(BatchError, match="does not take for a new document"):
        split({"input_ids": ids(2, 4), "position_ids": first}, axes=3)
