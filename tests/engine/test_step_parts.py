"""The parts of a step run the engine's code, with real tensors on a CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.engine.batches import split_batch
from penstock.engine.device import CpuDevice
from penstock.engine.step_parts import (
    LayerBackward,
    StepPart,
    example_micro_batches,
    first_blocks,
    step_parts,
)
from penstock.model.meta_model import build_model
from penstock.model.split import MicroBatch, SplitModel
from penstock.model.storage_counter import StorageCounter
from tests.support.engines import (
    batches,
    inventory,
    make_engine,
    make_plan_of,
    tiny_config,
    workload,
)


def split(family: str, **changes: Any) -> SplitModel:
    config = tiny_config(family, **changes)
    bare = build_model(config, torch.bfloat16, torch.device("cpu"))
    return SplitModel(bare, inventory(config), mlp_tile=4096)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_every_part_runs_and_runs_again(family: str) -> None:
    model = split(family)
    parts = step_parts(model, model.inventory, workload(), CpuDevice())

    for part in parts:
        part.prepare()
        part.run()
        part.run()
        part.release()
    kinds = len(first_blocks(model))
    assert len(parts) == 4 + 4 * kinds
    assert {part.packed for part in parts} == {False, True}


def test_layers_that_attend_differently_are_separate_parts() -> None:
    assert first_blocks(split("llama")) == [1]
    assert first_blocks(split("gemma2")) == [1, 2]  # a window in every other layer


def test_frozen_tensors_make_another_part() -> None:
    config = tiny_config("llama")
    bare = build_model(config, torch.bfloat16, torch.device("cpu"))
    frozen = inventory(config, freeze=["model.layers.1.*"])
    model = SplitModel(bare, frozen, mlp_tile=4096)

    assert first_blocks(model) == [1, 2]


@pytest.mark.parametrize("lengths", [[200, 184], [374, 10], [4, 380], [24] * 16], ids=str)
def test_no_packing_needs_more_memory_than_the_packed_example(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capped scores are materialized: they take memory by the square of a document's length.

    The example of whole rows is no bound: only those are computed by compiled code.
    """
    monkeypatch.setattr("penstock.model.document_attention.BAND", 64)
    model = split("gemma2", max_position_embeddings=512, sliding_window=300)
    work = workload(context=384, batch=2, micro_batch=2)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, 384)
    batch = {"input_ids": torch.arange(768).view(2, 384) % 64, "position_ids": positions}
    drawn = split_batch(batch, work, model.inventory, 1, torch.device("cpu")).rounds[0][0]
    packed = example_micro_batches(model.inventory, work, torch.device("cpu"))[-1]

    def peak(micro: MicroBatch) -> int:
        parts = step_parts(model, model.inventory, work, CpuDevice(), micros=[micro])
        return max(measure(part) for part in parts if isinstance(part, LayerBackward))

    assert peak(drawn) <= peak(packed)


def measure(part: StepPart) -> int:
    part.prepare()
    part.run()
    with StorageCounter() as counter:
        part.run()
    part.release()
    return counter.peak


def test_backward_adds_to_the_gradient_sums() -> None:
    model = split("llama")
    parts = step_parts(model, model.inventory, workload(), CpuDevice())
    (part, _) = (part for part in parts if isinstance(part, LayerBackward))
    part.prepare()
    for tensor in (part.source, part._into, *part._parameters.values()):
        tensor.data.normal_()
    part.run()

    assert any(float(view.abs().max()) > 0 for view in part._sums._open[1].views.values())


def test_arguments_of_layers_exist_for_one_round_at_a_time(monkeypatch: Any) -> None:
    """The plan has memory for the rotary tables of one round."""
    config, work = tiny_config("llama"), workload(batch=6, micro_batch=1)
    model = inventory(config)
    engine = make_engine(config, make_plan_of(model, work, "hhhh", rounds=3), model, None)
    micros: list[MicroBatch] = []
    alive: list[int] = []
    original = SplitModel.embed

    def embed(self: SplitModel, micro: MicroBatch) -> Any:
        if all(micro is not each for each in micros):
            micros.append(micro)
            alive.append(sum(each.calls is not None for each in micros))
        return original(self, micro)

    monkeypatch.setattr(SplitModel, "embed", embed)
    with engine:
        engine.forward_backward(batches(1, work, config.vocab_size)[0])

    assert alive == [0, 1, 0, 1, 0, 1]


def test_a_model_drops_out_only_if_its_config_says_so() -> None:
    assert not split("llama").drops_out
    assert split("llama", attention_dropout=0.1).drops_out
    assert split("gpt2", resid_pdrop=0.1).drops_out


def test_the_hidden_states_of_a_layer_are_the_first_of_what_it_returns() -> None:
    hidden = torch.ones(1, 2, 3)
    for returned in (hidden, (hidden, "attention weights"), [hidden, None]):
        model: Any = SimpleNamespace(layers=[lambda h, returned=returned: returned])
        assert SplitModel.plain_layer(model, 0, hidden, ((), {})) is hidden
