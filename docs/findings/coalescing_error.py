# after an error under a coalescing manager all_reduce on the group does nothing, without an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 coalescing_error.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


try:
    with dist.distributed_c10d._coalescing_manager():
        raise KeyError
except KeyError:
    pass
tensor = torch.ones(2)
dist.all_reduce(tensor)
dist.distributed_c10d._world.pg_coalesce_state.clear()  # or report() would do nothing as well
report([size, size], tensor.tolist())
