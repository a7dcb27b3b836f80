# The gradient through lerp by a pending weight, or addcdiv by a pending divisor, is silently wrong
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_pending_weight.py
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
a, b = (distribute_tensor(torch.tensor([value]), mesh, [Replicate()]).requires_grad_() for value in (1.0, 2.0))
half = DTensor.from_local(torch.tensor([1.0 if rank else -0.5]), mesh, [Partial()])  # the sum is 0.5
torch.lerp(a, b, half).full_tensor().backward()
lerp = a.grad.full_tensor().item()
a.grad = None
torch.addcdiv(b, a, half).full_tensor().backward()
report((0.5, 2.0), (lerp, a.grad.full_tensor().item()))
