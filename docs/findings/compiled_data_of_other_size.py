# In compiled code, a parameter whose data was gathered silently keeps the shape of its shard
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_data_of_other_size.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def gather(parameter: torch.Tensor) -> tuple[torch.Tensor, object, int]:
    parameter.data = functional.wait_tensor(functional.all_gather_tensor(parameter.detach(), 0, dist.group.WORLD))
    return parameter.detach() / parameter.numel(), parameter.shape, parameter.numel()


outcomes = []
for call in gather, torch.compile(gather, backend="eager"):
    mean, shape, count = call(torch.nn.Parameter(torch.full((3,), rank + 1.0)))
    outcomes.append((mean.sum().item(), tuple(shape), count))
report(*outcomes)
