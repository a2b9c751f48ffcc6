"""Runs of `penstock train` equal plain transformers for every family that people use."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.plan.plan import Plan
from tests.equivalence.family_runs import GPU_FAMILIES, Case, compare, gpu_case
from tests.support.family_models import FAMILIES

LOSS = 1e-5
"""Largest relative difference of one of 20 losses in fp32. Measured: 3e-7 at most."""

EXCESS = 8.0
"""Largest difference of a tensor's weights after 20 steps, as a multiple of what rounding does to
the same tensor of plain transformers (`family_runs.weight_excess`). Measured: 0.7 to 2.5. If the
epsilon of AdamW is twice as large, it is 37."""

GPU_LOSS = 0.02
"""Largest difference of one of 20 losses in bf16 on a GPU."""

SAMPLE = {("Llama 3", True)}
"""Runs that are not only part of `make test-long`."""


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        pytest.param(
            name,
            packed,
            marks=[] if (name, packed) in SAMPLE else pytest.mark.long,
            id=f"{name}, {'packed' if packed else 'unpacked'}",
        )
        for name in FAMILIES
        for packed in (True, False)
    ],
)
def test_a_run_in_fp32_equals_plain_transformers(name: str, packed: bool, tmp_path: Path) -> None:
    found = compare(Case(FAMILIES[name], packed), tmp_path)

    assert found.last_loss < found.first_loss - 0.1, "it learned"
    assert found.difference.loss < LOSS, found
    assert found.excess is not None
    assert found.excess < EXCESS, found


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("name", GPU_FAMILIES)
def test_a_run_in_bf16_agrees_with_plain_transformers(name: str, tmp_path: Path) -> None:
    found = compare(gpu_case(name), tmp_path)

    assert found.difference.loss_absolute < GPU_LOSS, found
    numerics = Plan.load(tmp_path / "out" / "plan.json").workload.numerics
    assert numerics.compiled
    assert (numerics.attention, numerics.loss_kernel) == ("varlen", "fused")


@pytest.mark.long
def test_a_run_in_bf16_on_the_cpu_agrees_with_plain_transformers(tmp_path: Path) -> None:
    """The comparison of the GPU's runs, where there is none."""
    found = compare(gpu_case("Llama 3", "cpu"), tmp_path)

    assert found.difference.loss_absolute < GPU_LOSS, found
