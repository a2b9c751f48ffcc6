"""The modules that decide results, and the tests that may notice a change in them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def _in(package: str, names: str) -> list[str]:
    return [f"src/penstock/{package}/{name}.py" for name in names.split()]


MODULES = (
    *_in("engine", "engine compute gradients loss program batches hidden_states optimizer"),
    *_in("engine", "pending_update determinism"),
    *_in("model", "split mlp_tiles document_attention varlen_attention attention_launch"),
    *_in("plan", "workload lifetimes build_schedule placement buffers plan"),
    *_in("checkpoint", "training_state"),
    *_in("train", "resume"),
    *_in("optim", "rules reference formats norms"),
)

TESTS = (
    "tests/engine", "tests/equivalence", "tests/faults/test_engine_refusals.py",
    "tests/faults/test_engine_failures.py", "tests/model",
    "tests/plan", "tests/planner/test_evaluator.py", "tests/planner/test_cost.py",
    "tests/checkpoint/test_training_state.py", "tests/optim", "tests/train/test_resume.py",
    "tests/train/test_session.py", "tests/train/test_session_options.py", "tests/test_records.py",
)  # fmt: skip
"""Tests of the line map. More would find more, but the map takes as long as all of them."""

MARKERS = "not gpu and not vm and not long and not browser"
