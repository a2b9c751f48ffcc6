"""Names that are neither directories nor models of the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from penstock.errors import SurveyError
from penstock.model import hub
from penstock.model.config import load_whole_config


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Options of the calls that may ask the Hub, none of which finds anything."""
    calls: list[dict[str, Any]] = []

    def load(_: str, **options: Any) -> None:
        calls.append(options)
        raise OSError("not found")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", load)
    monkeypatch.setattr(hub, "_answers", [])
    monkeypatch.chdir(tmp_path)
    return calls


@pytest.mark.parametrize("name", ["demo", "demo/modle"])
def test_without_the_hub_only_downloaded_files_are_used(
    name: str, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_ask", lambda: False)
    with pytest.raises(
        SurveyError, match=f"^there is no directory {name} here, and the Hub could not be reached"
    ):
        load_whole_config(name)
    assert asked[0]["local_files_only"]


def test_a_name_that_the_hub_does_not_have_is_no_directory_either(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_ask", lambda: True)
    with pytest.raises(
        SurveyError, match=r"no directory demo here, .*Hub \(.*not found.*OWNER/NAME"
    ):
        load_whole_config("demo")
    assert not asked[0]["local_files_only"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./demo", "there is no directory ./demo here$"),
        ("runs/demo/model", "there is no directory runs/demo/model here$"),
        ("qwen3-14b", "is a name of `penstock fit`; its Hub ID is Qwen/Qwen3-14B"),
    ],
)
def test_the_hub_is_not_asked_for_names_that_it_cannot_have(
    name: str, words: str, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_ask", None)
    with pytest.raises(SurveyError, match=words):
        load_whole_config(name)
    assert not asked


def test_the_hub_is_asked_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, now = iter([False, True]), [0.0]
    monkeypatch.setattr(hub, "_ask", lambda: next(answers))
    monkeypatch.setattr(hub, "_answers", [])
    monkeypatch.setattr("penstock.model.hub.time.monotonic", lambda: now[0])

    assert [hub.hub_is_reachable() for _ in range(3)] == [False] * 3
    now[0] = hub.KEPT_SECONDS + 1
    assert hub.hub_is_reachable()
