"""Bad numbers, batches and plans, and full disks: a clear error, and nothing has changed."""

from __future__ import annotations

import math
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.prepare import prepare
from penstock.errors import (
    BatchError,
    EngineError,
    NonFiniteLossError,
    NonFiniteMasterError,
    PlanError,
)
from penstock.roles import Role
from penstock.storage.errors import DiskFullError
from tests.equivalence.runs import (
    DISK,
    DRAM,
    OPTIMIZER,
    RESIDENT,
    Setup,
    Way,
    differing,
    state_of,
    whole,
)
from tests.faults.engine_runs import SMALL, engine_threads, small_setup
from tests.support.engines import make_engine

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("way", [RESIDENT, SMALL], ids=lambda way: way.name)
def test_a_nan_weight_is_detected_before_anything_changes(way: Way, tmp_path: Path) -> None:
    setup = small_setup()
    setup.source.model.embed_tokens.weight.data[5, 3] = math.nan
    batch = setup.batches(1)[0]
    batch["input_ids"][1, 2] = 5
    with setup.engine(way, tmp_path) as engine:
        before = state_of(engine)

        with pytest.raises(NonFiniteLossError, match="step 1: the loss is nan") as caught:
            engine.step(batch)

        assert caught.value.step == 1
        assert engine.steps == 0
        assert differing(before, state_of(engine)) == []


def faulty_loss(fault: list[float]) -> Any:
    """Return a loss function that adds `fault[0]`.

    NaN makes the gradients NaN as well; infinity leaves them finite.
    """

    def loss(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        factor = fault[0] if math.isnan(fault[0]) else 1.0
        return -log_probs.sum() * factor + fault[0]

    return loss


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_batch_with_a_nonfinite_loss_changes_nothing(
    value: float, nonfinite: str, tmp_path: Path
) -> None:
    """The previous step's sweeps still run, and the next step continues from there."""
    setup, fault = small_setup(), [0.0]
    first, second, third = setup.batches(3)
    with setup.engine(SMALL, tmp_path, loss=faulty_loss(fault), nonfinite=nonfinite) as engine:
        engine.step(first)
        fault[0] = value
        if nonfinite == "raise":
            with pytest.raises(NonFiniteLossError):
                engine.step(second)
        else:
            assert not math.isfinite(float(engine.step(second)))
            assert engine.skipped
        fault[0] = 0.0
        assert engine.steps == 1
        engine.step(third)
        found = state_of(engine)
    with setup.engine(RESIDENT, tmp_path, loss=faulty_loss(fault)) as plain:
        plain.step(first)
        plain.step(third)
        assert differing(found, state_of(plain)) == []


@pytest.mark.parametrize("way", [RESIDENT, DRAM, DISK], ids=lambda way: way.name)
def test_a_weight_that_would_overflow_is_refused_by_name(way: Way, tmp_path: Path) -> None:
    setup = small_setup()
    first, second = setup.batches(2)
    with setup.engine(way, tmp_path, optimizer=OPTIMIZER | {"lr": 1e39}) as engine:
        engine.step(first)
        with pytest.raises(NonFiniteMasterError, match="Lower the") as caught:
            engine.step(second)

        names = [t.name for b in setup.model.blocks for t in b.tensors]
        assert caught.value.name in names
        for name in names:
            assert bool(whole(engine, name, Role.WEIGHT).float().isfinite().all())


BAD_BATCHES = {
    "too many rows": ((9, 16), {}, "9 x 16 tokens.*prepared for 6 x 16"),
    "rows too long": ((4, 17), {}, "4 x 17 tokens"),
    "no rows": ((0, 16), {}, "must be"),
    "labels of another shape": (
        (4, 16),
        {"labels": torch.zeros(4, 15)},
        r"labels has shape \(4, 15\)",
    ),
    "padding on the left": (
        (4, 16),
        {"attention_mask": (torch.arange(16) > 3).expand(4, 16)},
        "pad on the right",
    ),
    "a mask of another shape": (
        (4, 16),
        {"attention_mask": torch.ones(4, 3)},
        "attention_mask has shape",
    ),
    "positions of another shape": (
        (4, 16),
        {"position_ids": torch.zeros(4, 3)},
        "position_ids has shape",
    ),
}


@pytest.mark.parametrize(("shape", "more", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_a_batch_that_does_not_fit_the_workload_is_rejected(
    shape: tuple[int, int], more: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    setup = small_setup()
    with setup.engine(DRAM, tmp_path) as engine:
        with pytest.raises(BatchError, match=message):
            engine.step({"input_ids": torch.full(shape, 3), **more})

        assert math.isfinite(float(engine.step(setup.batches(1)[0])))


def with_value(value: int, row: int, column: int, fill: int = 3) -> torch.Tensor:
    """Return a tensor of `fill` for 4 rows of 16 tokens, with one other value."""
    tensor = torch.full((4, 16), fill)
    tensor[row, column] = value
    return tensor


def positions(**changes: int) -> torch.Tensor:
    """Return rows of two documents of 8 tokens; `at_5=9` changes column 5 of row 2."""
    rows = (torch.arange(16) % 8).repeat(4, 1)
    for name, value in changes.items():
        rows[2, int(name.removeprefix("at_"))] = value
    return rows


VOCABULARY = 260
BAD_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "a negative token": (
        {"input_ids": with_value(-1, 2, 7)},
        "input_ids is -1 in row 2, column 7",
    ),
    "a token beyond the vocabulary": (
        {"input_ids": with_value(VOCABULARY, 3, 0)},
        f"input_ids is 260 in row 3, column 0 .*from 0 to {VOCABULARY - 1}",
    ),
    "a label of -1": (
        {"labels": with_value(-1, 1, 15)},
        f"labels is -1 in row 1, column 15 .*-100.*from 0 to {VOCABULARY - 1}",
    ),
    "a label beyond the vocabulary": (
        {"labels": with_value(VOCABULARY, 0, 4)},
        "labels is 260 in row 0, column 4",
    ),
    "a label that int32 cannot hold": (
        {"labels": with_value(2**32 + 3, 0, 4)},
        f"labels is {2**32 + 3} in row 0, column 4",
    ),
    "tokens that are not integers": (
        {"input_ids": torch.full((4, 16), 3.0)},
        "input_ids must be integers.*float32",
    ),
    "labels that are not integers": (
        {"labels": torch.full((4, 16), 3.0)},
        "labels must be integers.*float32",
    ),
    "positions that are not integers": (
        {"position_ids": positions().double()},
        "position_ids must be integers.*float64",
    ),
    "a list": ({"labels": [[3] * 16] * 4}, "labels must be a tensor, got list"),
    "a negative position": (
        {"position_ids": positions(at_0=-1)},
        "position_ids is -1 in row 2, column 0",
    ),
    "a position beyond the model's": (
        {"position_ids": positions(at_0=10**6)},
        "position_ids is 1000000 in row 2, column 0 .*the model has positions from 0 to",
    ),
    "the first position beyond the model's": (
        {"position_ids": positions(at_0=128)},
        "position_ids is 128 in row 2, column 0 .*the model has positions from 0 to 127",
    ),
    "a position that jumps": (
        {"position_ids": positions(at_5=9)},
        "position_ids is 9 in row 2, column 5",
    ),
    "a position that stands still": (
        {"position_ids": positions(at_5=4)},
        "position_ids is 4 in row 2, column 5",
    ),
    "a mask that numbers documents": (
        {"attention_mask": 1 + torch.arange(16).div(8, rounding_mode="floor").repeat(4, 1)},
        "attention_mask is 2 in row 0, column 8 .*position_ids",
    ),
    "a mask with a hole": (
        {"attention_mask": with_value(0, 3, 5, fill=1)},
        "attention_mask is 0 in row 3, column 5 .*pad on the right",
    ),
    "a key that nothing uses": (
        {"token_type_ids": torch.zeros(4, 16)},
        "the batch has token_type_ids, which the engine would ignore",
    ),
    "no label to predict": (
        {"labels": torch.full((4, 16), -100)},
        "no token has a label to predict",
    ),
}


@pytest.mark.parametrize("call", ["step", "evaluate"])
@pytest.mark.parametrize(("changes", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_value_that_no_kernel_may_see_is_named_with_row_and_column(
    changes: dict[str, Any], message: str, call: str, tmp_path: Path
) -> None:
    setup = small_setup()
    with setup.engine(RESIDENT, tmp_path) as engine:
        assert engine.inventory.vocabulary == VOCABULARY
        batch = {"input_ids": torch.full((4, 16), 3)} | changes
        with pytest.raises(BatchError, match=message):
            engine.step(batch) if call == "step" else engine.evaluate([batch])

        assert engine.batches == engine.steps == 0
        assert math.isfinite(float(engine.step(setup.batches(1)[0])))


def test_the_largest_token_and_position_and_short_integers_are_accepted(
    tmp_path: Path,
) -> None:
    setup = small_setup()
    ids = setup.batches(1)[0]["input_ids"]
    ids[0, 3] = VOCABULARY - 1
    with setup.engine(RESIDENT, tmp_path) as engine:
        expected = engine.evaluate([{"input_ids": ids}])
        for dtype in (torch.int32, torch.int16):
            assert engine.evaluate([{"input_ids": ids.to(dtype)}]) == expected
        last = engine.inventory.max_context
        assert last is not None
        late = (torch.arange(16) + last - 16).expand_as(ids)
        assert math.isfinite(engine.evaluate([{"input_ids": ids, "position_ids": late}]).loss)


def test_padding_may_have_any_label_and_position(tmp_path: Path) -> None:
    """Tokenizers write 1 as the position of padding, and collators the padding token as label."""
    setup = small_setup()
    batch = setup.batches(1)[0]
    mask = (torch.arange(16) < torch.tensor([16, 11, 5, 1, 0, 16])[:, None]).long()
    counted = torch.where(mask.bool(), torch.arange(16), 1)
    labels = torch.where(mask.bool(), batch["labels"], 10**6)
    with setup.engine(DRAM, tmp_path) as engine:
        plain = engine.evaluate([batch | {"attention_mask": mask}])
        given = {"attention_mask": mask, "position_ids": counted, "labels": labels}
        padded = engine.evaluate([batch | given])

    assert padded == plain
    assert padded.tokens == int(((batch["labels"] != -100) & mask.bool())[:, 1:].sum())


def test_padding_after_the_last_position_of_the_model_is_accepted(tmp_path: Path) -> None:
    setup = small_setup()
    ids = setup.batches(1)[0]["input_ids"]
    mask = (torch.arange(16) < 4).long().expand_as(ids)
    with setup.engine(RESIDENT, tmp_path) as engine:
        assert engine.inventory.max_context is not None
        late = torch.arange(16) + engine.inventory.max_context - 4
        late = torch.where(mask.bool(), late, 0)
        batch = {"input_ids": ids, "attention_mask": mask, "position_ids": late}
        assert math.isfinite(engine.evaluate([batch]).loss)


def test_a_batch_without_labels_is_skipped_if_the_user_asks_for_it(tmp_path: Path) -> None:
    setup = small_setup()
    first, second = setup.batches(2)
    ignored = second | {"labels": torch.full_like(second["labels"], -100)}
    with setup.engine(DRAM, tmp_path, nonfinite="skip") as engine:
        engine.step(first)
        before = state_of(engine)
        assert math.isnan(float(engine.step(ignored)))
        assert engine.skipped
        assert differing(before, state_of(engine)) == []


def test_a_batch_without_labels_may_be_a_part_of_a_step(tmp_path: Path) -> None:
    setup = small_setup()
    batch = setup.batches(1)[0]
    ignored = batch | {"labels": torch.full_like(batch["labels"], -100)}
    with setup.engine(DRAM, tmp_path) as engine:
        assert float(engine.forward_backward(ignored, num_items=1)) == 0.0
        engine.apply()
        with pytest.raises(BatchError, match="num_items must be 1 or more, got 0"):
            engine.forward_backward(batch, num_items=0)


def test_padding_on_the_right_does_not_change_the_loss(tmp_path: Path) -> None:
    setup = small_setup()
    batch = setup.batches(1)[0]
    mask = (torch.arange(16) < 11).expand(6, 16)
    with setup.engine(DRAM, tmp_path) as engine:
        first = engine.evaluate([batch | {"attention_mask": mask}])
        padded = torch.where(mask, batch["input_ids"], 9)
        second = engine.evaluate([batch | {"attention_mask": mask, "input_ids": padded}])

    assert first == second
    assert first.tokens == int((batch["labels"][:, 1:11] != -100).sum())


def test_a_batch_without_tokens_is_rejected_with_its_keys(tmp_path: Path) -> None:
    setup = small_setup()
    with (
        setup.engine(DRAM, tmp_path) as engine,
        pytest.raises(BatchError, match="no input_ids; its keys are: labels"),
    ):
        engine.step({"labels": torch.zeros(4, 16)})


def test_gradients_can_be_neither_overwritten_nor_applied_twice(tmp_path: Path) -> None:
    setup = small_setup()
    batch = setup.batches(1)[0]
    with setup.engine(DRAM, tmp_path) as engine:
        with pytest.raises(EngineError, match="no gradients"):
            engine.apply()
        engine.forward_backward(batch)
        with pytest.raises(EngineError, match="have not been applied"):
            engine.forward_backward(batch)
        engine.apply()
        with pytest.raises(EngineError, match="no gradients"):
            engine.apply()
    with pytest.raises(EngineError, match="closed"):
        engine.step(batch)
    engine.close()  # a second close does nothing


def test_a_plan_for_another_model_is_rejected_by_fingerprint(tmp_path: Path) -> None:
    setup, other = small_setup(), Setup.of("llama", batch=4, config={"num_hidden_layers": 2})
    plan = other.plan(DISK, tmp_path)

    with pytest.raises(PlanError, match="fingerprint"):
        prepare(setup.source, plan=plan, device="cpu")

    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("what", ["weight slots", "gradient buffers", "NVMe staging"])
def test_a_plan_with_other_buffer_sizes_than_the_schedule_is_rejected(
    what: str, tmp_path: Path
) -> None:
    setup = small_setup()
    plan = setup.plan(DISK, tmp_path)
    short = tuple(
        replace(pool, nbytes=pool.nbytes - 4096) if pool.what == what else pool
        for pool in plan.pools
    )

    with pytest.raises(PlanError, match=f"{what}.*make a new one"):
        make_engine(setup.config, replace(plan, pools=short), setup.model, setup.source)

    assert os.listdir(tmp_path) == []
    assert engine_threads() == []


def test_a_full_disk_is_reported_before_the_first_step(tmp_path: Path) -> None:
    """A limit on file sizes makes the kernel refuse the store's file, as on a full disk."""
    setup = small_setup()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, hard))
    try:
        with pytest.raises(DiskFullError, match="needs") as caught:
            setup.engine(DISK, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert caught.value.wanted > 256 << 10
    assert os.listdir(tmp_path) == []
    assert engine_threads() == []


def test_a_nonfinite_loss_of_an_earlier_call_skips_the_accumulated_step(tmp_path: Path) -> None:
    """An infinite loss leaves gradients finite, so only the loss says that the step is bad."""
    setup, fault = Setup.of("llama", batch=4, accumulate=True), [math.inf]
    first, second, third = setup.batches(3)
    with setup.engine(DRAM, tmp_path, loss=faulty_loss(fault), nonfinite="skip") as engine:
        before = state_of(engine)
        engine.forward_backward(first)
        fault[0] = 0.0
        engine.forward_backward(second)
        engine.apply()
        assert engine.skipped
        assert engine.steps == 0
        assert differing(before, state_of(engine)) == []

        engine.step(third)
        assert not engine.skipped, "the next step is judged by its own batches"
        assert differing(before, state_of(engine)) != []


def test_the_loss_is_divided_by_the_given_number_of_items(tmp_path: Path) -> None:
    """Twice the number halves loss and gradient exactly."""
    setup = small_setup()
    batch = setup.batches(1)[0]
    items = int((batch["labels"][:, 1:] != -100).sum())
    losses, norms = [], []
    with setup.engine(RESIDENT, tmp_path, optimizer=OPTIMIZER | {"lr": 0.0}) as engine:
        for number in (None, items, 2 * items):
            losses.append(float(engine.forward_backward(batch, num_items=number)))
            engine.apply()
            norms.append(engine.grad_norm)

    assert losses == [losses[0], losses[0], losses[0] / 2]
    assert norms == [norms[0], norms[0], norms[0] / 2]
