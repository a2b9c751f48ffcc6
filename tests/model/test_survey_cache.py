"""A survey is made once for each config, and never used for another one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import SurveyError
from penstock.model import survey_cache
from penstock.model.survey_cache import cached_survey, loaded_config

CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def surveys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configs that were surveyed, with an empty cache at the beginning."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made: list[Any] = []
    survey_config = survey_cache.survey_config

    def record(config: Any, **options: Any) -> Any:
        made.append(config)
        return survey_config(config, **options)

    monkeypatch.setattr(survey_cache, "survey_config", record)
    return made


def write_model(directory: Path, **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    return directory


def test_a_survey_is_made_once(tmp_path: Path, surveys: list[Any]) -> None:
    first = cached_survey(write_model(tmp_path / "one"))
    second = cached_survey(write_model(tmp_path / "two"))

    assert len(surveys) == 1
    assert (first[1].model, second[1].model) == (str(tmp_path / "one"), str(tmp_path / "two"))
    assert first[1].blocks == second[1].blocks
    assert first[1].fingerprint == second[1].fingerprint
    assert first[0].to_dict() == second[0].to_dict()
    assert loaded_config(second[0]).hidden_size == 64


@pytest.mark.parametrize(
    "options",
    [{"changes": {"num_hidden_layers": 2}}, {"freeze": ["*embed*"]}, {"trust_remote_code": True}],
)
def test_other_options_are_another_survey(
    tmp_path: Path, surveys: list[Any], options: dict[str, Any]
) -> None:
    model = write_model(tmp_path / "model")
    plain = cached_survey(model)[1]

    other = cached_survey(model, **options)[1]

    assert len(surveys) == 2
    expected = plain if "trust_remote_code" in options else None
    assert (other == plain) is (expected is plain)


def test_another_config_is_another_survey(tmp_path: Path, surveys: list[Any]) -> None:
    cached_survey(write_model(tmp_path / "model"))

    inventory = cached_survey(write_model(tmp_path / "model", num_hidden_layers=5))[1]

    assert len(surveys) == 2
    assert len(inventory.layers) == 5


def test_another_version_of_transformers_is_another_survey(
    tmp_path: Path, surveys: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    cached_survey(model)
    monkeypatch.setattr(survey_cache.importlib.metadata, "version", lambda package: "0.0.1")

    cached_survey(model)

    assert len(surveys) == 2


def test_changed_code_is_another_survey(
    tmp_path: Path, surveys: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    cached_survey(model)
    monkeypatch.setattr(survey_cache, "code_fingerprint", lambda: "changed")

    cached_survey(model)

    assert len(surveys) == 2


@pytest.mark.parametrize("damage", ["damaged", "writable by others"])
def test_an_entry_that_cannot_be_trusted_is_made_again(
    tmp_path: Path, surveys: list[Any], damage: str
) -> None:
    model = write_model(tmp_path / "model")
    expected = cached_survey(model)[1]
    (entry,) = (tmp_path / "cache/penstock/surveys").iterdir()
    if damage == "damaged":
        entry.write_text(entry.read_text()[:-20])
    else:
        entry.chmod(0o666)

    assert cached_survey(model)[1] == expected

    assert len(surveys) == 2
    assert entry.stat().st_mode & 0o777 == 0o600


def test_a_missing_config_is_reported_as_without_a_cache(
    tmp_path: Path, surveys: list[Any]
) -> None:
    with pytest.raises(SurveyError, match=r"has no config\.json"):
        cached_survey(tmp_path)
    with pytest.raises(SurveyError, match="there is no directory"):
        cached_survey(tmp_path / "missing")
    assert not surveys


def test_a_cached_survey_imports_neither_torch_nor_transformers(
    tmp_path: Path, surveys: list[Any]
) -> None:
    model = write_model(tmp_path / "model")
    cached_survey(model)
    code = (
        f"import sys; from penstock.model.survey_cache import cached_survey; "
        f"config, inventory = cached_survey({str(model)!r}); config.to_dict(); "
        f"assert len(inventory.layers) == 3; "
        f"sys.exit(str([m for m in ('torch', 'transformers') if m in sys.modules] or ''))"
    )
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": "/usr/bin"}

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )

    assert done.stderr.strip() == ""
