# A foreach function silently takes its one pending factor as the first DTensor of the list needs it
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_foreach_factor.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (2,))
part = 1.0 if rank else 0.0
pending = DTensor.from_local(torch.tensor([part / 2]), mesh, [Partial()])  # the sum is 0.5
factor = DTensor.from_local(torch.tensor(2.0 + part), mesh, [Partial()])  # the sum is 5
found = torch._foreach_mul([distribute_tensor(torch.ones(1), mesh, [Replicate()]), pending], factor)
report([5.0, 2.5], [x.full_tensor().item() for x in found])
