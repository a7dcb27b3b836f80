# Inductor's broadcast gives silently wrong values if the tensor has other strides on another rank
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_broadcast_strides.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

dist.init_process_group("gloo")
rank = dist.get_rank()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def sent(x: torch.Tensor) -> torch.Tensor:
    """Broadcast a sum from rank 0."""
    return funcol.broadcast(x + 1, 0, dist.group.WORLD)


given = torch.arange(6.0).view(2, 3)
if rank == 1:
    given = given.t().contiguous().t()  # equal numbers, transposed in memory
report((given + 1).tolist(), torch.compile(sent)(given).tolist())
