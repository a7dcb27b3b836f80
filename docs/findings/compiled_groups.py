# a compiled function that is given another group takes the rank and the size of the first one
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_groups.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


@torch.compile(backend="eager", fullgraph=True)
def size_of(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return x * dist.get_world_size(group)


alone = [dist.new_group([0]), dist.new_group([1])][rank]
size_of(torch.ones(1), dist.group.WORLD)
report(1.0, size_of(torch.ones(1), alone).item())
