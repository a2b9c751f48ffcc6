"""Streamed weights give the tokens of resident weights, and memory is divided as planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.engine.weight_streamer import block_nbytes, kept_blocks
from penstock.errors import PenstockError
from penstock.generate.generator import Generator
from penstock.generate.load import (
    ACTIVATIONS,
    MemorySplit,
    ModelTooLargeError,
    layer_activations,
    resident_activations,
    split_memory,
)
from penstock.generate.streamed_forward import engine_forward, stream_model
from penstock.model.survey import survey_config
from penstock.units import GiB, MiB
from tests.kv.tiny_generators import random_prompts, reference_tokens, run, tiny_model
from tests.support.engines import (
    batches,
    inventory,
    make_engine,
    make_plan_of,
    plain_model,
    tiny_config,
    workload,
)
from tests.support.models import model as shape_of

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("llama", "gemma2", "gemma3")


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_weights_give_the_tokens_of_resident_weights(family: str, tmp_path: Path) -> None:
    model, prompts = tiny_model(family), random_prompts((5, 30, 18))
    expected = [reference_tokens(model, prompt, 10) for prompt in prompts]
    model.save_pretrained(tmp_path)
    surveyed = survey_config(model.config, name=family)
    layer = block_nbytes(surveyed, surveyed.layers[0], torch.float32)
    for keep in (0, 3 * layer):
        forward = stream_model(
            model.config, surveyed, tmp_path, dtype=torch.float32, keep=keep, device="cpu"
        )
        with Generator(forward, budget="64MiB", max_batch=3, prefill_chunk=16) as generator:
            assert run(generator, prompts, 10) == expected
        kept = len(forward.weights.kept)
        assert (kept > 0) == (keep > 0)
        assert kept < len(surveyed.blocks)
        forward.close()


def test_a_tied_head_gets_its_weights(tmp_path: Path) -> None:
    config = tiny_config("llama", tie_word_embeddings=True, eos_token_id=None)
    model = plain_model(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    surveyed = survey_config(model.config, name="tied")
    forward = stream_model(
        model.config, surveyed, tmp_path, dtype=torch.float32, keep=0, device="cpu"
    )
    with Generator(forward, budget="64MiB") as generator:
        assert run(generator, [[5, 6, 7]], 6) == [reference_tokens(model, [5, 6, 7], 6)]


def test_kept_blocks_fit_into_the_given_memory() -> None:
    surveyed = survey_config(tiny_config("llama"), name="llama")
    sizes = [block_nbytes(surveyed, block, torch.float32) for block in surveyed.blocks]
    for room in (0, sizes[1], sum(sizes) - 1, sum(sizes)):
        kept = kept_blocks(surveyed, torch.float32, room)
        assert sum(sizes[at] for at in kept) <= room
    assert kept == frozenset(range(len(sizes)))


def test_memory_is_divided_within_the_budget() -> None:
    surveyed = survey_config(tiny_config("llama"), name="llama")
    weights = surveyed.parameters() * 4
    slots = 2 * max(block_nbytes(surveyed, block, torch.float32) for block in surveyed.blocks)

    plenty = split_memory(surveyed, torch.float32, weights + 100 * MiB, "cpu")
    assert not plenty.streamed
    assert plenty.cache == 100 * MiB

    tight = split_memory(surveyed, torch.float32, weights, "cpu")
    assert tight.streamed
    assert slots + tight.cache + tight.keep <= weights

    with pytest.raises(ModelTooLargeError, match="set --hbm") as error:
        split_memory(surveyed, torch.float32, slots, "cpu")
    again = split_memory(surveyed, torch.float32, error.value.wanted, "cpu")
    assert again.cache > 0
    assert isinstance(error.value, PenstockError)


def test_smaller_chunks_are_preferred_to_streaming() -> None:
    wide = tiny_config("llama", intermediate_size=16384)  # 8192 tokens of it are 0.8 GiB in bf16
    surveyed = survey_config(wide, name="llama")
    weights = surveyed.parameters() * 2

    def split(spare: int) -> MemorySplit:
        return split_memory(surveyed, torch.bfloat16, weights + spare * MiB, "cuda")

    assert (split(2048).streamed, split(2048).chunk) == (False, None)
    assert (split(1024).streamed, split(1024).chunk) == (False, 512)
    assert split(1024).cache + resident_activations(surveyed, torch.bfloat16, 512) == 1024 * MiB
    assert split(700).streamed


@pytest.mark.parametrize(("name", "chunk"), [("llama-3.1-8b", 2048), ("llama-3.1-70b", 1024)])
def test_streamed_chunks_are_as_large_as_the_memory_allows(name: str, chunk: int) -> None:
    surveyed = shape_of(name)
    room = split_memory(surveyed, torch.bfloat16, 12 * GiB, "cuda")

    assert (room.streamed, room.chunk) == (True, chunk)
    assert layer_activations(surveyed, torch.bfloat16, chunk) <= ACTIVATIONS // 2


@pytest.mark.parametrize("spots", ["hhhh", "dddd", "nndd"])
def test_an_engine_generates_with_the_weights_of_its_last_step(spots: str, tmp_path: Path) -> None:
    config = tiny_config("llama", eos_token_id=None)
    model = inventory(config)
    work = workload()
    plan = make_plan_of(model, work, spots, disk=tmp_path if "n" in spots else None)
    first, second = batches(2, work, 260)
    engine = make_engine(config, plan, model, None)
    engine.step(first)
    with engine_forward(engine) as forward, Generator(forward, budget="64MiB") as generator:
        actual = run(generator, [[5, 6, 7, 8]], 8)
    weights = {name: engine.state[name]["weight"] for name in engine.state}
    loss = float(engine.step(second))
    engine.close()

    plain = plain_model(config, dtype=torch.bfloat16).eval()
    plain.load_state_dict(weights)
    assert actual == [reference_tokens(plain, [5, 6, 7, 8], 8)]
    unseen = make_engine(config, plan, model, None)
    unseen.step(first)
    assert float(unseen.step(second)) == loss  # generating has changed nothing
    unseen.close()
