"""Threads that issue work, one per lane. Room: move.

Copies, reads and sweeps wait for one another on the host; the thread that computes must not. So
each lane has a thread of its own, asleep between steps, which carries its jobs out in order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from penstock.stream.device import Device
from penstock.stream.marks import Marks, StoppedError

Job = Callable[[], None]


class Lane:
    """One thread. After a failure the jobs that are left of the run are not begun."""

    def __init__(self, name: str, device: Device) -> None:
        self.name = name
        self._device = device
        self._runs: queue.SimpleQueue[tuple[Sequence[Job], Marks, threading.Event] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._serve, name=f"penstock {name}", daemon=True)
        self._thread.start()

    def start(self, jobs: Sequence[Job], marks: Marks) -> threading.Event:
        """Carry them out; the event is set when the thread is idle again."""
        idle = threading.Event()
        self._runs.put((jobs, marks, idle))
        return idle

    def close(self) -> None:
        self._runs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (run := self._runs.get()) is not None:
            jobs, marks, idle = run
            try:
                with self._device.lane(self.name):
                    for job in jobs:
                        if marks.failed is not None:
                            break
                        job()
            except StoppedError:
                pass
            except BaseException as error:
                marks.fail(error)
            idle.set()


class Lanes:
    """All of them, made once."""

    def __init__(self, names: Sequence[str], device: Device) -> None:
        self._lanes = {name: Lane(name, device) for name in names}

    def start(self, jobs: dict[str, list[Job]], marks: Marks) -> list[threading.Event]:
        return [self._lanes[name].start(todo, marks) for name, todo in jobs.items() if todo]

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
