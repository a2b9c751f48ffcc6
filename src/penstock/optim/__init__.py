"""Optimizers whose step is a single pass over the parameters: the optimizer sweep.

`AdamW`, `SGD` and `Lion` are drop-in `torch.optim` optimizers for parameters in host memory. The
training engine calls `sweep.start` (CPU) and `device_sweep.start` (GPU) directly. All of them give
the same bits, wherever the state is.

- `rules` computes the constants of a step, `formats` defines how states are stored, and `reference`
  specifies every step bit by bit in plain torch operations.
- `sweep` runs the native core on the CPU: steps (`sweep.start`), and sums of squares of gradients
  (`sweep.grad_stats`). `thread_pool` has its threads, and `sweep_benchmark` measures it.
- `norms` defines the result of a pass over gradients, for the CPU and the GPU: sum of squares, norm
  and first non-finite element.
- `device_sweep`, `device_norms` and `device_backend` run the Triton kernels in `device_kernels` and
  `norm_kernels`, or `reference` if there is no Triton.
- `optimizers` has the `torch.optim` classes.

- `tensor_rules` has the rules that need whole tensors, Muon and Adafactor, for the engine.

[Note: adding an optimizer] A rule can be added if it updates each element on its own, from its
gradient, its master weight and at most two moments of the parameter's shape. Adafactor does not
fit: it needs sums over rows and columns of a tensor, and a sweep splits tensors at multiples of
4096 elements and processes the parts independently. Such rules are in `tensor_rules`.

1. `rules`: add its name to `RuleName` and `NUM_MOMENTS`, and a function that returns its
   `Coefficients` for a step. If it needs a new constant, add a field to `Coefficients`, and add the
   same field to the struct in `csrc/sweep_kernels.h`, to `csrc/bind_sweep.cpp`, to `_native.pyi`,
   and to the arguments of `sweep_kernel` and its launch in `device_sweep`.
2. `reference`: add a step function and its entry in `_STEP`. This is the specification: write one
   operation per line, because every operation rounds once.
3. Native core: write the rule in `csrc/sweep_rules.h`. Add it to the enum `Rule` in `csrc/sweep.h`
   and, at the same position, to the table at the end of `csrc/sweep_kernels.cpp`; `kRules` in
   `csrc/sweep_kernels.h` is the size of that table. If it has two moments, change `two` in
   `SweepJob::step_tile` (`csrc/sweep_job.cpp`), which is true for AdamW alone. Bind its name in
   `csrc/bind_sweep.cpp` and `_native.pyi`, and add it to `_RULE` in `sweep`.
4. GPU: add the rule to two places in `sweep_kernel` in `device_kernels`: the step, with the same
   operations in the same order, and the branch that stores the second moment. Until then the kernel
   does not compile for the new rule.
5. Checks: `sweep._check` and `device_backend._expected_dtypes` require a first moment of every rule
   except SGD, which has none without momentum.
6. `optimizers`: add a subclass of `SweepOptimizer`, and export it here.
7. Tests: add the rule to `RULES` in `tests/support/sweeps.py` and `tests/support/device_sweeps.py`.
   The tests in `tests/optim` then compare CPU and GPU with the reference in every format. Compare
   the class with torch's in `tests/optim/test_against_torch.py`.
8. Add the formula to `docs/sweep.md`.

The class then trains parameters in host memory. The docstring of `engine.optimizer` says how to
add it to the engine.
"""

from penstock.optim.optimizers import SGD, AdamW, Lion

__all__ = ["AdamW", "SGD", "Lion"]
