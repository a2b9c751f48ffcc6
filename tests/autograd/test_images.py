"""Multimodal models: the language model streams, and towers stay with the caller."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import penstock as ps
from penstock.autograd.model_masks import ModelMask, find_spans
from penstock.autograd.towers import Towers
from penstock.errors import BatchError, UnsupportedModelError
from penstock.model.attention import AttentionOptions
from penstock.model.document_attention import TwoWaySpans, _attend_two_ways, _CausalAttention
from tests.support.multimodal_models import batch, build, freeze_towers

STEPS = 10
LR = 1e-3

pytestmark = pytest.mark.filterwarnings("ignore:.*warmup of the learning rate.*")


def stream(model: Any, *, hbm: str = "64MiB", tokens: int = 64, **options: Any) -> tuple[Any, Any]:
    return ps.stream(
        model, tokens=tokens, budget={"hbm": hbm, "dram": "64MiB"}, device="cpu", lr=LR,
        weight_decay=0.0, betas=(0.9, 0.95), self_check=False, **options,
    )  # fmt: skip


def plain_optimizer(model: Any) -> Any:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=LR, weight_decay=0.0, betas=(0.9, 0.95))


def train(model: Any, optimizer: Any, name: str, side: str, steps: int = STEPS) -> list[Any]:
    """Train with the model's own loss, on batches of which the third has no images."""
    found = []
    for step in range(steps):
        loss = model(**batch(name, step, images=step != 2, side=side)).loss
        loss.backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        # Relative to the largest: the gradient of the bias of keys is zero but for rounding.
        norms = [float(torch.linalg.vector_norm(p.grad)) for p in trained]
        norm = float(torch.nn.utils.clip_grad_norm_(trained, 1.0))
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm, *(n + 0.1 * norm for n in norms)))
    return found


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("qwen2_5_vl", "right"),
        ("gemma3", "left"),
        pytest.param("gemma3", "right", marks=pytest.mark.long),
        pytest.param("qwen2_vl", "left", marks=pytest.mark.long),
        pytest.param("llava", "right", marks=pytest.mark.long),
    ],
)
def test_losses_norms_and_saved_weights_equal_plain_torch(
    name: str, side: str, tmp_path: Path
) -> None:
    plain = build(name)
    expected = train(plain, plain_optimizer(plain), name, side)
    model, optimizer = stream(build(name))
    found = train(model, optimizer, name, side)
    model.save_pretrained(tmp_path)
    model.close()

    assert len(expected) == STEPS
    for step, pair in enumerate(zip(found, expected, strict=True)):
        assert pair[0] == pytest.approx(pair[1], rel=1e-5), step
    saved = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, dtype="float32")
    assert type(saved) is type(plain)
    weights = zip(plain.named_parameters(), saved.parameters(), model.parameters(), strict=True)
    for (key, theirs), file, ours in weights:
        assert torch.equal(file, ours), key
        assert theirs.requires_grad or torch.equal(theirs, file), key


def test_images_reach_the_loss() -> None:
    model, _ = stream(build("gemma3"))
    inputs = batch("gemma3", 0)
    with torch.no_grad():
        one = model(**inputs).loss
        other = model(**{**inputs, "pixel_values": inputs["pixel_values"] + 1.0}).loss
        causal = model(**{**inputs, "token_type_ids": torch.zeros_like(inputs["input_ids"])}).loss
    model.close()

    assert len({one.item(), other.item(), causal.item()}) == 3


@pytest.mark.parametrize("name", ["gemma3", pytest.param("qwen2_5_vl", marks=pytest.mark.long)])
def test_bits_do_not_depend_on_budgets_and_resume_exactly(name: str, tmp_path: Path) -> None:
    model, optimizer = stream(build(name), hbm="64MiB")
    expected = train(model, optimizer, name, "right", 4)
    model.close()

    first, optimizer = stream(build(name), hbm="2MiB", loss_memory="512KiB")
    assert train(first, optimizer, name, "right", 4) == expected
    first.save_checkpoint(tmp_path)
    ahead = train(first, optimizer, name, "right", 2)
    first.close()
    other = build(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    second, optimizer = stream(other)
    second.load_checkpoint(tmp_path)
    assert train(second, optimizer, name, "right", 2) == ahead
    second.close()
    weights = zip(model.state_dict().values(), first.state_dict().values(), strict=True)
    assert any(not torch.equal(a, b) for a, b in weights)  # two more steps


def test_lora_equals_peft_in_plain_torch() -> None:
    from peft import LoraConfig, get_peft_model

    found = []
    for streamed in (False, True):
        config = LoraConfig(
            r=4, target_modules=r".*language_model.*\.(q_proj|down_proj)", init_lora_weights=False
        )
        model: Any = get_peft_model(build("qwen2_5_vl"), config)
        optimizer = None if streamed else plain_optimizer(model)
        if streamed:
            model, optimizer = stream(model)
        found.append(train(model, optimizer, "qwen2_5_vl", "right", 5))
        if streamed:
            model.base_model.model.close()

    for step, pair in enumerate(zip(*found, strict=True)):
        assert pair[0] == pytest.approx(pair[1], rel=1e-5), step


def test_a_trained_tower_is_refused_with_the_call_that_freezes_it() -> None:
    model = build("qwen2_5_vl")
    model.model.visual.requires_grad_(True)
    with pytest.raises(UnsupportedModelError, match=r"model\.model\.visual\.requires_grad_\(False"):
        stream(model)


def test_an_adapter_on_the_tower_is_refused() -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(build("gemma3"), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(UnsupportedModelError, match="exclude_modules"):
        stream(model)


def test_features_that_reach_the_layers_in_another_way_are_refused() -> None:
    config = transformers.Qwen3VLConfig(
        text_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
        },
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32},
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = transformers.Qwen3VLForConditionalGeneration(config)
    freeze_towers(model)
    with pytest.raises(UnsupportedModelError, match="deepstack_visual_embeds"):
        stream(model)


def test_embeddings_positions_and_tokens_that_do_not_fit_are_refused() -> None:
    model, _ = stream(build("qwen2_5_vl"))
    inputs = batch("qwen2_5_vl", 0)
    shape = inputs["input_ids"].shape
    with pytest.raises(BatchError, match="no inputs_embeds"):
        model(inputs_embeds=torch.zeros(*shape, 64))
    with pytest.raises(BatchError, match=r"takes \[3, 2, 28\], or \[4, 2, 28\]"):
        model(**{**inputs, "position_ids": torch.zeros(5, *shape, dtype=torch.int64)})
    packed = torch.arange(28).repeat(2, 1) % 14
    with pytest.raises(BatchError, match=r"positions of shape \[4, rows, tokens\]"):
        model(input_ids=inputs["input_ids"], position_ids=packed)

    table = model.get_input_embeddings()
    look_up = table.forward
    table.forward = lambda ids: 2 * look_up(ids)
    with pytest.raises(UnsupportedModelError, match="changes the embedding of ordinary tokens"):
        model(**inputs)
    model.close()


def test_packed_documents_of_a_model_with_three_positions_equal_plain_torch() -> None:
    ids = torch.randint(3, 110, (1, 24), generator=torch.Generator().manual_seed(0))
    positions = (torch.arange(24) % 10).expand(4, 1, 24)
    plain = build("qwen2_5_vl")
    expected = plain(input_ids=ids, position_ids=positions, use_cache=False).logits
    model, _ = stream(build("qwen2_5_vl"))
    with torch.no_grad():
        found = model(input_ids=ids, position_ids=positions).logits
    model.close()

    assert torch.allclose(found, expected, atol=2e-5)


def test_masks_are_planned_for_models_that_make_them() -> None:
    """Four bytes for each pair of a token and one that it may see."""
    with_masks, without = (Towers(build(name)) for name in ("gemma3", "qwen2_5_vl"))
    for towers, nbytes in ((with_masks, 4), (without, 0)):
        long, short = (towers.memory(48, context, 1, 2) for context in (24, 16))
        assert long - short == nbytes * 48 * (24 - 16)


def test_after_close_the_model_is_what_it_was() -> None:
    model = build("gemma3")
    inputs = batch("gemma3", 1)
    with torch.no_grad():
        expected = model(**inputs).logits
    names = model.state_dict().keys()
    streamed, _ = stream(model)
    weights = {name: tensor.clone() for name, tensor in streamed.state_dict().items()}
    assert weights.keys() == names
    streamed.load_state_dict({n: t + 1 if "visi" in n else t for n, t in weights.items()})
    with torch.no_grad():
        assert not torch.allclose(streamed(**inputs).logits, expected)
    streamed.load_state_dict(weights)
    streamed.close()

    assert streamed is model
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected)


def test_prepare_refuses_a_multimodal_model_and_names_stream() -> None:
    model = build("qwen2_5_vl")
    with pytest.raises(UnsupportedModelError, match=r"penstock\.stream"):
        ps.prepare(model, context=32, batch=1, budget={"hbm": "64MiB", "dram": "64MiB"})


# Masks.

VISIBLE_SPANS = [[(3, 7), (12, 14)], []]


def recorded(spans: Any, window: int | None, bounds: Any = None) -> ModelMask:
    length, rows = 20, []
    numbers = torch.arange(length)
    for row, own in enumerate(spans):
        shown = numbers[None, :] <= numbers[:, None]
        if window is not None:
            shown = shown & (numbers[None, :] > numbers[:, None] - window)
        if bounds is not None:
            inside = torch.zeros(length, length, dtype=torch.bool)
            for start, end in itertools.pairwise(bounds[row]):
                inside[start:end, start:end] = True
            shown = shown & inside
        for start, end in own:
            shown[start:end, start:end] = True
        rows.append(shown[None])
    return ModelMask(torch.stack(rows), None)


@pytest.mark.parametrize("bounds", [None, [[0, 9, 20], [0, 20]]])
def test_spans_are_found_in_masks(bounds: Any) -> None:
    masks = {
        "full_attention": recorded(VISIBLE_SPANS, None, bounds),
        "sliding_attention": recorded(VISIBLE_SPANS, 5, bounds),
    }
    assert find_spans(masks, bounds, 5, "model") == VISIBLE_SPANS
    assert find_spans({"full_attention": recorded([[], []], None)}, None, None, "model") is None


@pytest.mark.parametrize("change", [(2, 15), (10, 1)])
def test_masks_that_show_anything_else_are_refused(change: tuple[int, int]) -> None:
    mask = recorded(VISIBLE_SPANS, None)
    mask.visible[0, 0][change] ^= True
    with pytest.raises(UnsupportedModelError, match="row 0"):
        find_spans({"full_attention": mask}, None, None, "model")
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        find_spans({"chunked_attention": recorded([[]], None)}, None, None, "model")


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3, 5])
def test_two_way_spans_attend_as_a_mask_does(
    window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.model.document_attention.BAND", 4)
    draw = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(2, heads, 20, 8, generator=draw) for heads in (4, 2, 2))
    bounds = [[0, 9, 20], [0, 3, 20]]
    spans = [[(3, 7), (12, 14)], [(5, 15)]]
    options = AttentionOptions(0.3, 0.0, window, softcap)
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    found = _attend_two_ways(
        _CausalAttention(module, options), query, key, value, TwoWaySpans(bounds, [0, 3], spans)
    )

    mask = recorded(spans, window, bounds).visible
    keys, values = (t.repeat_interleave(2, dim=1) for t in (key, value))
    scores = query @ keys.transpose(2, 3) * 0.3
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    expected = (weights @ values).transpose(1, 2)
    expected[1, :3] = 0.0
    assert torch.allclose(found, expected, atol=1e-6)
