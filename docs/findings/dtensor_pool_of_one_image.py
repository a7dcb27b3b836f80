# The gradient of adaptive_avg_pool2d of one image, without a batch, is silently wrong if its rows are sharded
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_pool_of_one_image.py
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
whole, weights = torch.ones(8, 8, 8), torch.arange(280.0).reshape(8, 5, 7)
plain, given = whole.clone().requires_grad_(), distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_()
functional.adaptive_avg_pool2d(plain, (5, 7)).backward(weights)
functional.adaptive_avg_pool2d(given, (5, 7)).backward(distribute_tensor(weights, mesh, [Shard(1)]))
found = given.grad.full_tensor()
report((8, True), (found.shape[1], torch.equal(found, plain.grad)))
