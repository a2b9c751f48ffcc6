"""The engine: executes a plan, step by step.

The planner (`penstock.planner`) decides what is stored where; the engine follows the plan and moves
nothing to another tier on its own.

Where to look:

- `prepare`: `penstock.prepare`, from a model and budgets to an engine.
- `engine`: `Engine`, the object that users train with.
- `program`, `allocate`: the schedule made ready to run, and all memory that it needs.
- `runner`, `ticket_board`, `step_state`: one thread per lane, and how lanes wait for each other.
- `transfer`, `disk_pipe`: every read, write, copy and CPU sweep. Activations are written to NVMe by
  `transfer.Mover.offload_activations`.
- `plan_choice`, `memory_source`: which plan to follow, and how much working memory it must have.
- `rehearsal`, `step_parts`, `trace_memory`: the parts of a step, run once to measure their memory
  on the GPU, or with fake tensors.
- `device_memory`: torch's allocator, and errors that say who holds the GPU's memory.
- `determinism`: torch restricted to deterministic kernels while the engine computes.
- `transport`, `rank_exchange`, `report`: several ranks; what they do together in a step.
- `device`: what the engine needs from the GPU, or from the CPU in its place.
- `batches`: a batch, checked and split into rounds of micro-batches.
- `compute`, `hidden_states`, `gradients`, `gradient_buffers`, `loss`, `loss_kernels`: forward, loss
  and backward of one block. `gradients` starts the norm for clipping; `optim.device_norms` computes
  it on a GPU and `optim.sweep.grad_stats` on a CPU, and `Engine.apply` uses it.
- `optimizer`, `pending_update`: the optimizer as users see it, and the update that sweeps carry
  out.
- `tier_memory`, `spans`, `memory_usage`: where weights, states, gradients and activations live.
- `tensor_access`, `state_view`, `state_io`, `initial_weights`, `bounded_executor`: parameters by
  name, files, and the threads that load them.
- `weight_streamer`: weights streamed through the device for generation.
- `step_records`: which operation ran when.
"""
