"""Optimizers whose step is a single pass over the parameters: the optimizer sweep.

`AdamW`, `SGD` and `Lion` are drop-in `torch.optim` optimizers for parameters in host memory. The
training engine calls `sweep.start` (CPU) and `device_sweep.start` (GPU) directly. All of them give
the same bits, wherever the state is.

- `rules` computes the constants of a step, `formats` defines how states are stored, and `reference`
  specifies every step bit by bit in plain torch operations.
- `sweep`, `thread_pool` and `norms` run the native core on the CPU; `sweep_benchmark` measures it.
- `device_sweep`, `device_norms` and `device_backend` run the Triton kernels in `device_kernels` and
  `norm_kernels`, or `reference` if there is no Triton.
- `optimizers` has the `torch.optim` classes.

To add an optimizer:

1. `rules`: add its name to `RuleName` and `NUM_MOMENTS`, and a function that returns its
   `Coefficients` for a step.
2. `reference`: add a step function and its entry in `_STEP`. This is the specification: write one
   operation per line, because every operation rounds once.
3. Native core: add the rule to `csrc/sweep_rules.h`, to the enum in `csrc/sweep.h`, to
   `csrc/bind_sweep.cpp` and to `_native.pyi`; then to `_RULE` in `sweep`.
4. GPU: add a branch to `sweep_kernel` in `device_kernels`, with the same operations in the same
   order.
5. `optimizers`: add a subclass of `SweepOptimizer`, and export it here.
6. Tests: add the rule to `RULES` in `tests/support/sweeps.py` and `tests/support/device_sweeps.py`.
   The tests in `tests/optim` then compare CPU and GPU with the reference in every format. Compare
   the class with torch's in `tests/optim/test_optimizers.py`.
7. Add the formula to `docs/sweep.md`.

The engine trains with AdamW: `engine/optimizer.py` maps its settings to `Coefficients`.
"""

from penstock.optim.optimizers import SGD, AdamW, Lion

__all__ = ["AdamW", "SGD", "Lion"]
