# vmap of a functional collective never waits for it: the result is silently what there was before the collective
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_vmap.py
# It exits with 1 where the defect is there.

import sys
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def summed(row: torch.Tensor) -> torch.Tensor:
    return functional.wait_tensor(functional.all_reduce(row, "sum", dist.group.WORLD)) + 0


rows = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
if rank:
    time.sleep(1)  # rank 0 has to wait for this rank
observed = torch.vmap(summed)(rows).tolist()
report((rows * size).tolist(), observed)
