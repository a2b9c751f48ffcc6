"""Size the device memory for updates of whole tensors (`penstock.optim.tensor_rules`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.model.inventory import Inventory, TensorSpec, adafactor_elements, is_muon_matrix
from penstock.optimizer_options import UPDATE_CHUNK, WHOLE_TENSOR
from penstock.plan.workload import Workload
from penstock.roles import EXTENT
from penstock.units import MiB, round_up

WORKSPACE = "optimizer workspace"
"""Name of the pool in a plan."""

TEMPORARIES = 96
"""Bytes of temporary tensors per element of a chunk. Stochastic rounding needs the most: it draws
random bits as 64-bit integers."""

PRODUCTS = 64 * MiB
"""Bytes that cuBLAS may allocate for matrix products on one more stream."""


@dataclass(frozen=True, slots=True)
class UpdateWorkspace:
    """The sizes of a `penstock.optim.tensor_rules.Workspace`, in elements."""

    chunk: int
    """A chunk of a tensor."""
    matrix: int
    """The largest matrix that Muon orthogonalizes."""
    gram: int
    """The largest product of such a matrix with itself."""
    temporaries: int
    """Bytes of tensors that an update allocates and frees."""

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated once."""
        return round_up(5 * 4 * self.chunk + 2 * 2 * (self.matrix + self.gram), EXTENT)

    @classmethod
    def of(cls, inventory: Inventory, workload: Workload) -> UpdateWorkspace | None:
        """Return the sizes for a workload; None if its optimizer updates element by element."""
        if workload.optimizer not in WHOLE_TENSOR:
            return None
        tensors = [
            tensor
            for block in inventory.blocks
            for tensor in block.tensors
            if tensor.trainable and (workload.optimizer != "muon" or is_muon_matrix(block, tensor))
        ]
        chunk = round_up(max(map(_chunk_elements, tensors), default=0), EXTENT)
        matrix = gram = factors = 0
        if workload.optimizer == "muon":
            shapes = [tensor.shape[-2:] for tensor in tensors]
            matrix = round_up(max(map(math.prod, shapes), default=0), EXTENT)
            gram = round_up(max((min(shape) ** 2 for shape in shapes), default=0), EXTENT)
        else:
            # The second moments of rows and columns, while they are updated.
            factors = 8 * max((adafactor_elements(tensor.shape) for tensor in tensors), default=0)
        return cls(chunk, matrix, gram, TEMPORARIES * chunk + factors)


def _chunk_elements(tensor: TensorSpec) -> int:
    """Return the number of elements of the largest chunk of a tensor."""
    columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    return min(tensor.elements, max(UPDATE_CHUNK, columns))
