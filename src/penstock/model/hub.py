"""Tell directories from names on the Hugging Face Hub, and find out whether the Hub answers."""

from __future__ import annotations

import time
from pathlib import Path

from penstock.errors import SurveyError
from penstock.model.known_models import HUB_IDS

SECONDS = 5.0
"""How long to wait for the Hub's first answer."""

KEPT_SECONDS = 60.0
"""How long an answer counts. A notebook may lose and regain its network."""

_answers: list[tuple[float, bool]] = []
"""When the Hub was last asked, and whether it answered."""


def check_name(model: str | Path) -> None:
    """Raise SurveyError for a name that is neither a directory nor can be one of the Hub."""
    name = str(model)
    if Path(model).exists():
        return
    if Path(model).is_absolute() or name.startswith((".", "~")) or name.rstrip("/").count("/") > 1:
        raise SurveyError(f"there is no directory {name} here")
    if name in HUB_IDS:
        raise SurveyError(
            f"{name} is a name of `penstock fit`; its Hub ID is {HUB_IDS[name]}. Pass that, or a "
            f"directory with the model"
        )


def hub_is_reachable() -> bool:
    """Return whether the Hub answers.

    Where it does not, transformers repeats each request for half a minute, and prints every
    attempt. What was downloaded before can be used without it.
    """
    now = time.monotonic()
    if not _answers or now - _answers[0][0] > KEPT_SECONDS:
        _answers[:] = [(now, _ask())]
    return _answers[0][1]


def _ask() -> bool:
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception:  # their classes differ by version, and offline mode has one of its own
        return False
    return True
