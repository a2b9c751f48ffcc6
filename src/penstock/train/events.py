"""Events of a run, and the listeners that print, log or record them.

An event is a plain mapping with its kind under `event`: `plan`, `note`, `eval`, `sample`,
`start_up`, `step`, `skipped`, `save`, `stopped` or `done`. With `--json`, each event except a note
is one line on standard output. Programs read these lines and metrics.jsonl, so names must not
change.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TextIO

Event = Mapping[str, Any]

ReportProgress = Callable[[int, int, str], None]
"""Called with the work done, the total (0 if unknown), and a description of the work."""


class Listener(Protocol):
    """Handles the events of a run."""

    def handle(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Listeners:
    """Passes each event to all listeners, in the order they were added."""

    def __init__(self, listeners: Sequence[Listener] = ()) -> None:
        self._listeners = list(listeners)

    def add(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def emit(self, kind: str, **fields: Any) -> None:
        """Pass an event to all listeners."""
        event = {"event": kind, **fields}
        for listener in self._listeners:
            listener.handle(event)

    def note(self, text: str) -> None:
        """Pass a message for people to all listeners."""
        self.emit("note", text=text)

    def close(self) -> None:
        """Close all listeners, the last one first."""
        for listener in reversed(self._listeners):
            listener.close()


class JsonLines:
    """Prints events as JSON lines on standard output, and notes on standard error."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def handle(self, event: Event) -> None:
        if event["event"] == "note":
            print(event["text"], file=sys.stderr, flush=True)
        else:
            print(to_json_line(event), file=self._stream, flush=True)

    def close(self) -> None:
        return


def to_json_line(event: Event) -> str:
    """Convert an event to standard JSON, which has no NaN and no infinity: they become null."""
    return json.dumps({name: _finite(value) for name, value in event.items()}, allow_nan=False)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
