# The gradient of det or slogdet of a transposed DTensor of shards is silently transposed
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_determinant_gradient.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


whole = torch.tensor([[2.0, 1.0], [0.0, 3.0]])
x = distribute_tensor(whole, init_device_mesh("cpu", (size,)), [Shard(0)]).requires_grad_()
try:
    torch.linalg.det(x.mT).backward()
except NotImplementedError:
    report("refused", "refused")  # as before 2.12
report([[3.0, 0.0], [-1.0, 2.0]], x.grad.full_tensor().tolist())
