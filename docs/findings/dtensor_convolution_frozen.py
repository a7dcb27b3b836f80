# The backward of a convolution of DTensors with a frozen weight and a bias that requires a gradient raises an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_convolution_frozen.py
# It exits with 1 where the defect is there: oneDNN computes the gradient of the weight as well, which has no layout.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
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
images = distribute_tensor(torch.ones(2 * size, 1, 1, 4), mesh, [Shard(0)])
kernels = distribute_tensor(torch.ones(1, 1, 1, 3), mesh, [Replicate()])
bias = distribute_tensor(torch.zeros(1), mesh, [Replicate()]).requires_grad_()
try:
    functional.conv2d(images, kernels, bias, padding=(0, 1)).sum().backward()
    observed: object = bias.grad.full_tensor().tolist()
except (RuntimeError, AssertionError) as error:
    observed = str(error)
report([8.0 * size], observed)
