"""What the driver says of its cards: memory in use, utilisation, PCIe traffic. Room: show."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from penstock.machine.discovery.gpus import open_nvml
from penstock.observe.samplers import Reading

KB = 1000
"""What the driver counts PCIe traffic in."""


class Cards:
    """Memory and utilisation of each card, as the driver sees them. `close` lets go of it."""

    name = "the driver's figures"
    every = 2

    def __init__(self, opened: Callable[[], Any] = open_nvml) -> None:
        self._stack = ExitStack()
        self._nvml: Any = self._stack.enter_context(opened())
        self.handles = visible_cards(self._nvml) if self._nvml is not None else []
        self._pcie = PcieTraffic(self._nvml, self.handles) if self.handles else None

    def read(self, into: Reading) -> None:
        for index, card in enumerate(self.handles):
            found = into.gpus[index]
            found["used"] = int(self._nvml.nvmlDeviceGetMemoryInfo(card).used)
            with contextlib.suppress(self._nvml.NVMLError):  # cut-up cards do not say
                rates = self._nvml.nvmlDeviceGetUtilizationRates(card)
                found["utilisation"] = rates.gpu / 100
            if self._pcie is not None and index in self._pcie.rates:
                found["h2d"], found["d2h"] = self._pcie.rates[index]

    def close(self) -> None:
        if self._pcie is not None:
            self._pcie.close()
        self._stack.close()


class PcieTraffic:
    """Bytes a second to and from each card. One question takes the driver 20 ms, in which it
    counts: so it is asked by a thread of its own."""

    def __init__(self, nvml: Any, handles: list[Any]) -> None:
        self._nvml, self._handles = nvml, handles
        self.rates: dict[int, tuple[float, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="penstock pcie", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _serve(self) -> None:
        nvml = self._nvml
        asked = (nvml.NVML_PCIE_UTIL_RX_BYTES, nvml.NVML_PCIE_UTIL_TX_BYTES)  # as the card sees it
        while not self._stop.wait(0.01):
            for index, card in enumerate(self._handles):
                try:
                    h2d, d2h = (nvml.nvmlDeviceGetPcieThroughput(card, kind) for kind in asked)
                except nvml.NVMLError:
                    self.rates.pop(index, None)
                    return  # a card without such counters has none later either
                self.rates[index] = (float(h2d * KB), float(d2h * KB))


def visible_cards(nvml: Any) -> list[Any]:
    """Handles in the order in which CUDA counts the cards that this process may use."""
    import os

    count = nvml.nvmlDeviceGetCount()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    found = []
    for name in (part.strip() for part in named.split(",")):
        try:
            if name.isdigit():
                found.append(nvml.nvmlDeviceGetHandleByIndex(int(name)))
            else:
                found.append(nvml.nvmlDeviceGetHandleByUUID(name))
        except nvml.NVMLError:
            break  # CUDA stops counting at the first that is not there
    return found
