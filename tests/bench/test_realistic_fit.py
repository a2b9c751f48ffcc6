"""Models of published sizes: what is compared, and the script itself with tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import realistic_fit
from penstock.model.survey import survey_config


def record(arm: str, **more: Any) -> dict[str, Any]:
    shown = dict.fromkeys(realistic_fit.SHOWN, 1)
    return {"case": "x", "arm": arm, **shown, "losses": [5.0, 4.0], **more}


@pytest.mark.parametrize(
    ("mine", "plain", "verdict"),
    [
        ({}, {"losses": [5.01, 4.01]}, "losses agree"),
        ({}, {"losses": [5.01, 4.03]}, "losses differ"),
        ({"losses": [5.0, float("nan")]}, {}, "failed"),
        ({"error": "too little"}, {}, "failed"),
        ({}, {"error": "OutOfMemoryError", "out_of_memory": True}, "trained"),
        ({}, {"error": "KeyError: x", "out_of_memory": False}, "failed"),
        ({}, None, "trained"),
    ],
)
def test_the_verdict_follows_from_both_arms(
    mine: dict[str, Any], plain: dict[str, Any] | None, verdict: str
) -> None:
    records = {("x", "penstock"): record("penstock", **mine)}
    if plain is not None:
        records["x", "plain"] = record("plain", **plain)

    assert realistic_fit.compare("x", records)["verdict"] == verdict


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gemma-3-4b", 3.88), ("phi-4-mini", 3.84),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("qwen3-4b", 4.02), ("gemma-3-1b", 1.00), ("mistral-7b", 7.25),
                         ("olmo-2-7b", 7.30), ("qwen3-8b", 8.19))
        ),
    ],
)  # fmt: skip
def test_the_models_have_the_published_sizes(name: str, billions: float) -> None:
    (case,) = [case for case in realistic_fit.CASES if case.name == name]
    inventory = survey_config(realistic_fit.make_config(case), name=name)

    assert inventory.parameters() / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("case", realistic_fit.CASES, ids=lambda case: str(case.name))
def test_tiny_models_have_the_losses_of_plain_torch(
    case: realistic_fit.Case, tmp_path: Path
) -> None:
    words = ["--tiny", "--device", "cpu", "--only", case.name, "--out", str(tmp_path)]

    code = realistic_fit.main([*words, "--scratch", str(tmp_path / "scratch")])

    (row,) = realistic_fit.collect(realistic_fit.arguments(words))["summary"]
    assert code == 0, row
    assert row["verdict"] == "losses agree"
