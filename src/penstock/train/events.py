"""What happens in a run, as plain mappings that every listener reads. Room: show.

One of them is one line of `--json`: `plan`, `note`, `eval`, `sample`, `step`, `skipped`, `save`,
`done`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

Event = Mapping[str, Any]


class Listener(Protocol):
    """Whoever wants to know."""

    def hear(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Listeners:
    """All of them, in turn."""

    def __init__(self, listeners: Sequence[Listener] = ()) -> None:
        self._listeners = list(listeners)

    def add(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def tell(self, kind: str, **what: Any) -> None:
        event = {"event": kind, **what}
        for listener in self._listeners:
            listener.hear(event)

    def note(self, text: str) -> None:
        """Something for a person."""
        self.tell("note", text=text)

    def close(self) -> None:
        for listener in reversed(self._listeners):
            listener.close()


class JsonLines:
    """One object per line on standard output, as it happens; words for people on the other one."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def hear(self, event: Event) -> None:
        if event["event"] == "note":
            print(event["text"], file=sys.stderr, flush=True)
        else:
            print(as_line(event), file=self._stream, flush=True)

    def close(self) -> None:
        return


def as_line(event: Event) -> str:
    """JSON as the standard has it: what is not finite is null."""
    return json.dumps({name: _finite(value) for name, value in event.items()}, allow_nan=False)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
