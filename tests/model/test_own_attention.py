"""Models with their own attention code compute each packed document as transformers does alone."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from penstock.errors import UnsupportedModelError, WorkloadError
from penstock.generate.requests import UnfitModelError
from penstock.generate.streamed_forward import stream_model
from penstock.model.compile import layer_kinds
from penstock.model.document_attention import find_documents
from penstock.model.inventory import Inventory
from penstock.model.live_model import LiveModel
from penstock.model.meta_model import build_model
from penstock.model.self_check import check_model
from penstock.model.split import MicroBatch, SplitModel
from penstock.model.storage_counter import StorageCounter
from penstock.model.survey import survey_model
from penstock.plan.workload import default_numerics
from tests.support.engines import inventory as survey
from tests.support.engines import tiny_config, workload

HEADS, HIDDEN, VOCABULARY, LENGTH = 6, 48, 64, 16
"""The number of heads is no power of two, for which ALiBi's slopes follow another rule."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
_GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS, "n_positions": 64,
    "rotary_dim": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip

CONFIGS: dict[str, Callable[[], Any]] = {
    "falcon": lambda: transformers.FalconConfig(**_COMMON),
    "falcon, new decoder": lambda: transformers.FalconConfig(
        **_COMMON, new_decoder_architecture=True, num_kv_heads=2
    ),
    "falcon, ALiBi": lambda: transformers.FalconConfig(
        **_COMMON, alibi=True, multi_query=False, parallel_attn=False, bias=True
    ),
    "bloom": lambda: transformers.BloomConfig(**_COMMON),
    "mpt": lambda: transformers.MptConfig(
        vocab_size=VOCABULARY, d_model=HIDDEN, n_layers=2, n_heads=HEADS, max_seq_len=40
    ),
    "gptj": lambda: transformers.GPTJConfig(**_GPT),
    "codegen": lambda: transformers.CodeGenConfig(**(_GPT | {"n_head": 4})),
    "gpt_neo": lambda: transformers.GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_layers=2, num_heads=HEADS, window_size=3,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=64,
    ),
    "xglm": lambda: transformers.XGLMConfig(
        vocab_size=VOCABULARY, d_model=HIDDEN, ffn_dim=64, num_layers=2, attention_heads=HEADS,
        dropout=0.0, attention_dropout=0.0,
    ),
}  # fmt: skip

PACKED = [[0, 6, 16], [0, 1, 5, 16], [0, 16]]
"""Documents of three rows; one is a single token, one fills its row."""

WHOLE = [[0, LENGTH]] * 3


def make_plain(config: Any) -> Any:
    """Return the unmodified model in fp32, with weights for which every part of it matters."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    with torch.no_grad():
        for parameter in model.float().parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return model.train()


def make_split(plain: Any, mlp_tile: int = 1024) -> tuple[SplitModel, dict[str, Any]]:
    """Return a copy of the model that runs block by block, and its parameters."""
    found = survey_model(plain, plain.config, name="tiny", check=check_model)
    assert found.own_attention
    split = SplitModel(copy.deepcopy(plain), found, mlp_tile=mlp_tile)
    named = {
        name: torch.nn.Parameter(parameter.detach().clone())
        for name, parameter in plain.named_parameters()
    }
    split.bind(named)
    return split, named


def make_batch(bounds: list[list[int]]) -> MicroBatch:
    drawn = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (len(bounds), LENGTH), generator=drawn)
    rows = [
        torch.cat([torch.arange(e - s) for s, e in itertools.pairwise(marks)]) for marks in bounds
    ]
    positions = torch.stack(rows)
    return MicroBatch(ids, positions, ids, find_documents(positions), 0)


def logits_of(split: SplitModel, micro: MicroBatch) -> torch.Tensor:
    hidden, calls = split.embed(micro)
    for index in range(len(split.layers)):
        hidden = split.layer(index, hidden, calls)
    return split.logits(hidden.flatten(0, 1))


def logits_alone(plain: Any, micro: MicroBatch, bounds: list[list[int]]) -> torch.Tensor:
    """Run the unmodified model on each document, one at a time."""
    parts = [
        plain(input_ids=micro.input_ids[row : row + 1, start:end], use_cache=False).logits[0]
        for row, marks in enumerate(bounds)
        for start, end in itertools.pairwise(marks)
    ]
    return torch.cat(parts)


def gradients(logits: torch.Tensor, named: dict[str, Any]) -> dict[str, torch.Tensor]:
    targets = torch.arange(logits.shape[0]) % VOCABULARY
    loss = torch.nn.functional.cross_entropy(logits, targets)
    found = torch.autograd.grad(loss, list(named.values()))
    return dict(zip(named, found, strict=True))


def assert_equal_to_plain(split: SplitModel, named: Any, plain: Any, bounds: Any) -> None:
    """Compare logits, and gradients of all parameters, relative to the largest number in them."""
    micro = make_batch(bounds)
    wanted, got = logits_alone(plain, micro, bounds), logits_of(split, micro)
    pairs = {"logits": (got.detach(), wanted.detach())}
    expected = gradients(wanted, dict(plain.named_parameters()))
    for name, gradient in gradients(got, named).items():
        pairs[name] = (gradient, expected[name])
    for name, (mine, theirs) in pairs.items():
        # The bias of keys has a gradient of zero but for rounding.
        largest = max(float(theirs.abs().max()), 1e-2)
        assert float((mine - theirs).abs().max()) <= 1e-5 * largest, name


SAMPLE = {
    *(("falcon, ALiBi", "packed"), ("mpt", "packed"), ("gpt_neo", "packed")),
    *(("gptj", "packed"), ("falcon, new decoder", "whole rows")),
}
"""Cases that are not only part of `make test-long`: each kind of attention once."""


@pytest.mark.parametrize(
    ("family", "bounds"),
    [
        pytest.param(
            family,
            bounds,
            id=f"{family}-{rows}",
            marks=() if (family, rows) in SAMPLE else pytest.mark.long,
        )
        for family in CONFIGS
        for rows, bounds in (("packed", PACKED), ("whole rows", WHOLE))
    ],
)
def test_logits_and_gradients_are_those_of_each_document_alone(
    family: str, bounds: list[list[int]]
) -> None:
    plain = make_plain(CONFIGS[family]())
    split, named = make_split(plain)

    assert_equal_to_plain(split, named, plain, bounds)


def test_layers_that_add_to_the_output_of_their_mlp_in_place_run_in_tiles() -> None:
    plain = make_plain(CONFIGS["falcon"]())
    split, named = make_split(plain, mlp_tile=4)

    assert_equal_to_plain(split, named, plain, WHOLE)


def test_masks_are_not_kept_and_the_embedding_keeps_its_parameters() -> None:
    split, named = make_split(make_plain(CONFIGS["bloom"]()))
    table = split.model.get_input_embeddings()  # type: ignore[operator]

    hidden, calls = split.embed(make_batch(PACKED))
    split.layer(0, hidden, calls)

    assert list(calls.arguments) == []
    assert table.weight is named["transformer.word_embeddings.weight"]


def test_the_embedding_need_not_be_bound_while_a_layer_runs() -> None:
    """The engine streams weights: those of the embedding may not be there any more."""
    split, named = make_split(make_plain(CONFIGS["falcon, ALiBi"]()))
    hidden, calls = split.embed(make_batch(PACKED))
    before = split.layer(0, hidden, calls)

    split.release()
    split.bind({n: p for n, p in named.items() if n.startswith("transformer.h.0.")})

    assert torch.equal(split.layer(0, hidden, calls), before)


def test_the_head_makes_no_mask_of_all_tokens() -> None:
    split, _ = make_split(make_plain(CONFIGS["falcon, ALiBi"]()))
    split.embed(make_batch(WHOLE))  # shows in which form layers return their output
    tokens = 256
    hidden = torch.randn(tokens, HIDDEN)

    with torch.no_grad(), StorageCounter() as counter:
        split.logits(hidden)

    assert counter.peak < tokens * tokens * 4


def test_the_model_gets_a_mask_of_integers() -> None:
    """Without a mask, transformers waits for the device, and BLOOM may sum floats on a GPU."""
    split, _ = make_split(make_plain(CONFIGS["bloom"]()))
    masks: list[torch.Tensor] = []

    def record(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        masks.append(given["attention_mask"])

    split.model.get_submodule("transformer").register_forward_pre_hook(record, with_kwargs=True)

    hidden, calls = split.embed(make_batch(PACKED))
    split.logits(split.layer(0, hidden, calls).flatten(0, 1))

    assert masks[0].shape == (3, LENGTH)
    assert (1, 6) in [mask.shape for mask in masks]
    assert masks[-1].shape == (1, 1)
    assert all(mask.dtype == torch.int64 and bool((mask == 1).all()) for mask in masks)


def test_layers_that_know_their_number_are_of_one_kind() -> None:
    """GPT-Neo's layers have it as `layer_id`. Each kind is checked and traced separately."""
    config = transformers.GPTNeoConfig(
        hidden_size=HIDDEN,
        num_layers=4,
        num_heads=HEADS,
        attention_types=[[["global", "local"], 2]],
    )
    layers = transformers.GPTNeoForCausalLM(config).transformer.h

    assert len(set(layer_kinds(list(layers)))) == 2


def test_a_live_model_with_another_attention_is_refused() -> None:
    """Falcon has other layers for each, and only the default was checked."""
    config = CONFIGS["falcon"]()
    model = transformers.FalconForCausalLM._from_config(config, attn_implementation="eager")

    with pytest.raises(UnsupportedModelError, match="attn_implementation='sdpa'"):
        LiveModel(model).copy_without_weights(
            torch.device("cpu"), torch.float32, own_attention=True
        )


@pytest.mark.parametrize(("family", "attention"), [("falcon", "sdpa"), ("bloom", "eager")])
def test_the_attention_is_the_one_of_the_class_whatever_the_config_names(
    family: str, attention: str
) -> None:
    config = CONFIGS[family]()
    config._attn_implementation = "flash_attention_2"

    model: Any = build_model(config, torch.bfloat16, torch.device("cpu"), own_attention=True)

    assert model.config._attn_implementation == attention


def test_penstocks_kernels_and_compiled_layers_are_not_used() -> None:
    found = make_split(make_plain(CONFIGS["gptj"]()))[0].inventory
    numerics = default_numerics(found, context=16, batch=1, kernels=True)

    assert numerics.attention == "sdpa"
    assert not numerics.compiled
    with pytest.raises(WorkloadError, match="its own code"):
        workload(attention="varlen").check(found)


def test_generation_is_refused_before_weights_are_read(tmp_path: Any) -> None:
    config = tiny_config("gptj")
    found: Inventory = survey(config)

    with pytest.raises(UnfitModelError, match="computes attention with its own code"):
        stream_model(config, found, tmp_path / "missing", dtype=torch.bfloat16, keep=0)


def test_a_position_bias_limits_the_context() -> None:
    config = CONFIGS["mpt"]()
    with torch.device("meta"):
        body = transformers.AutoModelForCausalLM.from_config(config)

    assert survey_model(body, config, name="mpt").max_context == 40


def test_each_layer_gets_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may pass other arguments to each layer, such as the mask of a window."""
    split, _ = make_split(make_plain(CONFIGS["gptj"]()))
    hidden, calls = split.embed(make_batch(PACKED))
    numbered = [((), {"number": 0}), ((), {"number": 1})]
    got: list[int] = []

    def record(_index: int, part: torch.Tensor, called: Any) -> torch.Tensor:
        got.append(called[1]["number"])
        return part

    monkeypatch.setattr(split, "enter", lambda **_: (hidden, numbered))
    monkeypatch.setattr(split, "plain_layer", record)

    split.layer(1, hidden, calls)

    assert got == [1] * 6  # documents
