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

`docs/sweep.md` (Add an optimizer) lists the steps for a new rule.
"""

from penstock.optim.optimizers import SGD, AdamW, Lion

__all__ = ["AdamW", "SGD", "Lion"]
