"""What a resumed run keeps from its checkpoint, and what the user may set anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.checkpoint.manifest import Checkpoint
from penstock.checkpoint.training_state import TrainingState
from penstock.plan.workload import Numerics
from penstock.records import to_json
from penstock.settings import Settings
from penstock.train.resume import ResumePoint, resumed_numerics

SAVED = Numerics(
    micro_batch=3, loss_chunk=1000, mlp_tile=2000, attention="varlen", loss_kernel="fused",
    head_sum="micro", compiled=True, deterministic=True,
)  # fmt: skip
FRESH = Numerics(micro_batch=1, loss_chunk=64, mlp_tile=64, head_sum="chunk")


def resume_point() -> ResumePoint:
    state = TrainingState(numerics={"workload": to_json(SAVED)})
    return ResumePoint(Checkpoint(path=Path("out/step-4"), step=4, files={}), state)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, SAVED),
        ({"micro_batch": 2}, replace(SAVED, micro_batch=2)),
        ({"batch": 2}, replace(SAVED, micro_batch=2)),
        ({"deterministic": False}, replace(SAVED, deterministic=False)),
    ],
    ids=["nothing set", "micro-batch", "a smaller batch", "not deterministic"],
)
def test_a_resume_keeps_the_numerics_of_the_checkpoint(
    given: dict[str, object], expected: Numerics
) -> None:
    settings = Settings.of({"batch": 8} | given)

    assert resumed_numerics(FRESH, resume_point(), settings) == expected
    assert resumed_numerics(FRESH, None, settings) == FRESH
