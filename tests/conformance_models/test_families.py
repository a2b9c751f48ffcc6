"""Every causal language model of transformers is computed right, or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.conformance_models.check import Outcome, examine
from tests.conformance_models.expected import (
    CASES,
    PAGE,
    expected,
    page,
    recorded_version,
    shorten,
)
from tests.conformance_models.tiny import FAMILIES, VARIANTS
from tests.support.samples import sample

SAMPLE = ("bert", "gpt2", "llama", "mixtral", "paligemma", "phi4_multimodal", "smolvlm", "whisper")
"""Cases that are not only part of `make test-long`."""

SLACK = 1.5
"""Another CPU may sum matrix products in another order, which changes the rounding of bf16."""

FP32 = 1e-4
"""Smallest difference that is recorded, for models that are compared in fp32."""


@pytest.mark.parametrize(
    "case",
    sample(CASES, SAMPLE),
)
def test_a_family_is_right_or_refused(case: str, tmp_path: Path) -> None:
    wanted = expected()[case]
    found = shorten(examine(case, tmp_path))
    assert found.kind in ("right", "refused"), str(found)
    assert found.kind == wanted.kind, str(found)
    if wanted.kind == "refused":
        assert found.text == wanted.text
    else:
        assert _difference(found) <= SLACK * max(_difference(wanted), FP32)
        assert _note(found) == _note(wanted)


def test_every_family_is_classified() -> None:
    """A class that a new release of transformers adds is tested before it is accepted."""
    listed = set(expected())
    assert {*FAMILIES, *VARIANTS} - listed == set()
    assert {outcome.kind for outcome in expected().values()} == {"right", "refused"}
    if transformers.__version__ == recorded_version():
        assert listed - {*FAMILIES, *VARIANTS} == set()


@pytest.mark.skipif(
    transformers.__version__ != recorded_version(),
    reason="the page lists the classes of another version of transformers",
)
def test_the_documentation_lists_what_is_expected() -> None:
    assert PAGE.read_text() == page(expected(), recorded_version())


def _difference(outcome: Outcome) -> float:
    return float(outcome.text.partition(",")[0])


def _note(outcome: Outcome) -> str:
    return outcome.text.partition(",")[2]
