"""Random configs are computed right, or refused."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.conformance_models.check import DOES_NOT_RUN, examine_config
from tests.conformance_models.expected import expected
from tests.conformance_models.random_configs import draw_case
from tests.conformance_models.tiny import VARIANTS, tiny_config
from tests.support.samples import sample

RIGHT = sorted(
    case for case, outcome in expected().items() if outcome.kind == "right" and case not in VARIANTS
)
FIXED = (1, 2)
"""Seeds of `make test`."""
ONE_LAYER: dict[str, dict[str, Any]] = {
    "bloom": {},
    "falcon": {},
    "llama": {},
    "opt": {"do_layer_norm_before": False},
}
"""Models whose layers return tuples, and models whose layers do not, one without a last norm."""
TODAY = int(datetime.datetime.now(datetime.UTC).strftime("%Y%m%d")) * 1000
DRAWN = range(TODAY, TODAY + 100)
"""Seeds of `make test-long`, others every day. A test's name has its seed."""


@pytest.mark.parametrize("family", sample(ONE_LAYER, ("bloom", "opt")))
def test_a_model_with_one_layer_is_right(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    config.num_hidden_layers = 1
    for name, value in ONE_LAYER[family].items():
        setattr(config, name, value)
    assert examine_config(config, tmp_path, "fp32").kind == "right"


SEEDS = [*FIXED, *(pytest.param(seed, marks=pytest.mark.long) for seed in DRAWN)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_config_is_right_or_refused(seed: int, tmp_path: Path) -> None:
    family, config = draw_case(seed, RIGHT)
    outcome = examine_config(config, tmp_path, "fp32")
    if outcome.text.startswith(DOES_NOT_RUN):
        pytest.skip(f"transformers does not run it: {outcome.text}")
    assert outcome.kind in ("right", "refused"), f"seed {seed}: {family}: {outcome}\n{config}"
