# The gradient of a mean loss over a sharded batch is silently as many times too large as there are shards
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_mean_loss_gradient.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (size,))
whole, target = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(4)
plain = whole.clone().requires_grad_()
functional.mse_loss(plain, target).backward()
given = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
functional.mse_loss(given, distribute_tensor(target, mesh, [Shard(0)])).backward()
report(plain.grad.tolist(), given.grad.full_tensor().tolist())
