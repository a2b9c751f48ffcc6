"""The engine: executes a plan, step by step.

Where to look:

- `prepare`: `penstock.prepare`, from a model and budgets to an engine.
- `engine`: `Engine`, the object that users train with.
- `program`, `allocate`: the schedule made ready to run, and all memory that it needs.
- `runner`, `ticket_board`, `step_state`: one thread per lane, and how lanes wait for each other.
- `transfer`, `disk_pipe`: every read, write, copy and CPU sweep. Activations are written to NVMe by
  `transfer.Mover.offload_activations`.
- `compute`, `hidden_states`, `gradients`, `loss`: forward, loss and backward of one block. The norm
  for clipping is computed in `gradients` and used in `Engine.apply`.
- `optimizer`, `pending_update`: the optimizer as users see it, and the update that sweeps carry
out.
- `tier_memory`, `spans`, `memory_usage`: where weights, states, gradients and activations live.
- `tensor_access`, `state_view`, `state_io`, `initial_weights`: parameters by name, and files.
- `weight_streamer`: weights streamed through the device for generation.
- `step_records`: which operation ran when.
"""
