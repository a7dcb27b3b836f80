# programs from torch.export with strict=False silently don't wait for dist.reduce, and broadcast can't be exported
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 exported_not_waited.py
# It exits with 1 where the defect is there.

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


class Reducing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Reduce to rank 0."""
        y = x * 2
        dist.reduce(y, 0)
        return y + 1


class Broadcasting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Broadcast from rank 1."""
        y = x * 2
        dist.broadcast(y, 1)
        return y + 1


x = torch.full((2,), 1.0 + rank)
right, found = {}, {}
for module in Reducing(), Broadcasting():
    name = type(module).__name__
    right[name] = module(x).tolist()
    try:
        program = torch.export.export(module, (x,), strict=False).module()
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"[:60]
        continue
    dist.barrier()
    time.sleep(0.3 * rank)  # rank 0 has to wait for rank 1
    found[name] = program(x).tolist()
    dist.barrier()
if rank == 1:
    found["Reducing"] = right["Reducing"]  # only rank 0 gets the sum
report(right, found)
