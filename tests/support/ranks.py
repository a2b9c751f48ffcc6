"""Run the same work on several ranks in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from penstock.distributed.thread_ranks import ThreadRanks
from penstock.engine.transport import Transport

T = TypeVar("T")


def on_each_rank(group: ThreadRanks, work: Callable[[Transport], T]) -> list[T]:
    """Call `work` in one thread for each rank; return the results, or raise the first error."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(transport: Transport) -> None:
        try:
            results[transport.rank] = work(transport)
        except BaseException as error:
            errors.append(error)
            transport.abort(error)

    threads = [threading.Thread(target=run, args=(each,)) for each in group.transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(len(threads))]
