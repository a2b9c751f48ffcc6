"""Several ranks: the transports that connect the engines of one run.

- `thread_ranks`: ranks in threads of one process, for tests.
- `gloo_ranks`: ranks in processes, on torch.distributed with gloo, for CPUs.
- `rank_group`: which rank this process is, and its transport.

`penstock.engine.transport` defines what a transport does.
"""
