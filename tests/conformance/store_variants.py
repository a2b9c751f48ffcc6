"""The paths, engines and options that the conformance suite creates stores with."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from penstock.storage.engines import EngineName
from penstock.storage.errors import StorageWarning
from penstock.storage.store import Store, StoreOptions
from penstock.units import KiB, MiB

CAPACITY = 16 * MiB
UNIT = 64 * KiB
SMALL = StoreOptions(request_nbytes=128 * KiB, depth=4)


@dataclass(frozen=True)
class StoreVariant:
    """Path, engine and verification of one parametrization."""

    path: str
    engine: EngineName
    verify: bool

    def create(self, capacity: int | str = CAPACITY, options: StoreOptions = SMALL) -> Store:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StorageWarning)
            return Store.create(
                self.path, capacity, engine=self.engine, verify=self.verify, options=options
            )
