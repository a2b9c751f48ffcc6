"""Activations of a micro-batch that is smaller than the others go to NVMe and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.equivalence.runs import DRAM, Setup, Way, differing, train


@pytest.mark.parametrize("context", [32, 600], ids=["within a unit", "beyond a unit"])
def test_a_smaller_micro_batch_ends_anywhere_in_its_extent(context: int, tmp_path: Path) -> None:
    """The last micro-batch has one of two rows: 4,096 of 8,192 bytes, or 76,800 of 153,600."""
    config = {"hidden_size": 64, "max_position_embeddings": 1024}
    setup = Setup.of("llama", config=config, context=context, batch=3, micro_batch=2)

    in_dram = train(setup, DRAM, tmp_path, steps=1)
    on_disk = train(setup, Way("activations on disk", ("dddn",)), tmp_path, steps=1)

    assert on_disk.losses == in_dram.losses
    assert differing(on_disk.state, in_dram.state) == []
