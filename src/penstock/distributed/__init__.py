"""Several ranks: the transports that connect the engines of one run.

- `thread_ranks`: ranks in threads of one process, for tests.
- `gloo_ranks`: ranks in processes, on torch.distributed with gloo, for CPUs.
- `nccl_ranks`: ranks in processes whose GPUs reach each other, on torch.distributed with NCCL.
- `rank_transport`: the one of these that the plan names.
- `shared_ranks`: ranks in processes of one machine, through shared host memory.
- `rank_group`: which rank this process is, and its transport.
- `peer_watch`: notices when another rank ends, fails or stalls, over `peer_sockets`.

`penstock.engine.transport` defines what a transport does.
"""
