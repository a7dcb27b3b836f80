# functional messages in a subgroup go to another rank than the named one, and fail or crash
# https://github.com/pytorch/pytorch/issues/187924
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=3 functional_messages.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo", timeout=timedelta(seconds=10))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


group = dist.new_group([1, 2])
expected = observed = [10.0, 10.0] if rank == 2 else [-1.0, -1.0]
tensor = torch.full((2,), 10.0 if rank == 1 else -1.0)
if rank == 1:
    functional.wait_tensor(functional.isend_inplace(tensor, 2, group=group))
elif rank == 2:
    functional.wait_tensor(functional.irecv_inplace(tensor, 1, group=group))  # raises, and torchrun ends with 1
    observed = tensor.tolist()
report(expected, observed)
