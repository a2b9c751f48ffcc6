"""`penstock fit` lists which well-known models a machine can train."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
import typer
from typer.testing import CliRunner, Result

from penstock.cli.fit import fit_command
from penstock.model.known_models import HUB_IDS, KNOWN_MODELS
from penstock.model.survey import survey, survey_config
from penstock.units import GiB

CONFIGS = Path(__file__).parents[1] / "configs"

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(fit_command)


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *args: CliRunner().invoke(app, list(args))


@pytest.mark.parametrize(
    ("known", "folder"),
    [
        ("qwen2.5-3b", "qwen2.5-3b"),
        *(
            pytest.param(*names, marks=pytest.mark.long)
            for names in (
                ("llama-3.1-8b", "llama-3.1-8b"),
                ("olmo-2-7b", "olmo-2-7b"),
                ("llama-3.3-70b", "llama-3.1-70b"),
                ("qwen3-8b", "qwen3-8b"),
                ("mixtral-8x7b", "mixtral-8x7b"),
                ("qwen3-30b-a3b", "qwen3-30b-a3b"),
            )
        ),
    ],
)
def test_the_sizes_are_those_of_the_published_config(known: str, folder: str) -> None:
    mine, theirs = KNOWN_MODELS[known].inventory(known), survey(CONFIGS / folder)

    assert mine.parameters() == theirs.parameters()
    assert [block.parameters() for block in mine.blocks] == [
        block.parameters() for block in theirs.blocks
    ]
    assert (mine.hidden, mine.vocabulary) == (theirs.hidden, theirs.vocabulary)
    mine_layer, their_layer = mine.layers[0], theirs.layers[0]
    for name in ("matmul_elements", "query_width", "key_value_width", "mlp_width"):
        assert getattr(mine_layer, name) == getattr(their_layer, name), name


EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe-1b-7b": ("Olmoe", {"intermediate_size": 1024}),
    "gpt-oss-20b": ("GptOss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "glm-4.5-air": ("Glm4Moe", {"attention_bias": True, "head_dim": 128}),
}
"""The family, and what its config has in place of the defaults of transformers."""


@pytest.mark.parametrize(
    "known", ["gpt-oss-20b", *(pytest.param(k, marks=pytest.mark.long)
                               for k in EXPERTS if k != "gpt-oss-20b")],
)  # fmt: skip
def test_the_sizes_of_experts_are_those_of_transformers(known: str) -> None:
    family, changes = EXPERTS[known]
    config = getattr(transformers, f"{family}Config")(**changes)
    mine, theirs = KNOWN_MODELS[known].inventory(known), survey_config(config, name=known)

    assert [block.parameters() for block in mine.blocks] == [
        block.parameters() for block in theirs.blocks
    ]
    for name in ("matmul_elements", "query_width", "key_value_width", "mlp_width"):
        assert getattr(mine.layers[-1], name) == getattr(theirs.layers[-1], name), name


PUBLISHED = {
    "qwen3-0.6b": 0.596, "llama-3.2-1b": 1.236, "qwen2.5-1.5b": 1.544, "qwen3-1.7b": 1.721,
    "llama-3.2-3b": 3.213, "qwen3-4b": 4.022, "mistral-7b": 7.248, "qwen2.5-7b": 7.616,
    "gemma-2-9b": 9.242, "mistral-nemo-12b": 12.248, "phi-4": 14.660, "qwen3-14b": 14.768,
    "mistral-small-24b": 23.572, "qwen3-30b-a3b": 30.532, "mixtral-8x7b": 46.703,
    "qwen2.5-32b": 32.764, "qwen3-32b": 32.762,
}  # fmt: skip
"""Parameters in billions, as the models' pages state them."""


def test_parameter_counts_are_the_published_ones() -> None:
    found = {name: KNOWN_MODELS[name].inventory(name).parameters() / 1e9 for name in PUBLISHED}
    assert {name: round(count, 3) for name, count in found.items()} == PUBLISHED


def test_a_table_of_models_and_contexts(fit: Callable[..., Result]) -> None:
    flags = ("--machine", "desktop-24gb", "--context", "4096", "--context", "16384")
    done = fit("qwen3-0.6b", "llama-3.1-8b", "gemma-2-9b", *flags)

    assert done.exit_code == 0, done.output
    assert "…" not in done.output
    lines = [line.split() for line in done.output.splitlines()]
    small, big, short = (
        next(line for line in lines if line[:1] == [name] and line[2] == context)
        for name, context in (
            ("qwen3-0.6b", "4,096"), ("llama-3.1-8b", "4,096"), ("gemma-2-9b", "16,384")
        )
    )  # fmt: skip
    assert (small[1], small[3], small[-1]) == ("0.6B", "yes", "gpu")
    assert big[3:] == ["no"]
    assert short[3:] == ["max", "8,192"]
    assert "may fit with an NVMe drive: --nvme PATH:SIZE" in " ".join(done.output.split())


def test_json_has_the_bytes_of_each_tier(fit: Callable[..., Result]) -> None:
    flags = ("--machine", "desktop-24gb", "--context", "4096", "--batch", "2", "--json")
    done = fit("llama-3.1-8b", *flags, "--nvme", "/mnt/nvme:400GiB", "--dram", "100GiB")
    (row,) = json.loads(done.stdout)

    assert (row["fits"], row["batch"], row["context"]) == (True, 2, 4096)
    assert row["tiers"]["dram"] > 64 * GiB
    assert row["tokens_per_second"] == pytest.approx(2 * 4096 / row["step_seconds"])
    assert "desktop-24gb has 64.0 GiB of dram: this plan is for a machine like it" in done.stderr


def test_a_model_fits_whatever_is_left_of_dram(fit: Callable[..., Result]) -> None:
    flags = ("--machine", "desktop-24gb", "--nvme", "/mnt/nvme:900GiB", "--context", "4096")
    done = fit("gemma-3-27b", *flags, "--dram", "118GiB", "--json")
    assert [row["fits"] for row in json.loads(done.stdout)] == [True]


def test_nothing_is_read_from_the_network_or_with_transformers(
    fit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("transformers was asked")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)
    assert fit("qwen3-0.6b", "--machine", "h200", "--context", "2048").exit_code == 0


def test_an_unknown_model_lists_the_known_ones(fit: Callable[..., Result]) -> None:
    done = fit("gpt-9")
    assert done.exit_code == 2
    assert "gpt-9 is not in the list: qwen3-0.6b" in " ".join(done.output.replace("│", "").split())


def test_every_model_has_an_id_on_the_hub() -> None:
    assert list(HUB_IDS) == list(KNOWN_MODELS)
    assert all(name.count("/") == 1 for name in HUB_IDS.values())
