# A convolution of images that are sharded over their width is silently wrong since 2.12: ranks keep to their pixels
# https://github.com/pytorch/pytorch/issues/191926
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64. It was right in 2.11.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_convolution_of_width.py
# It exits with 1 where the defect is there.

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
images, kernels = torch.ones(1, 1, 1, 4), torch.tensor([1.0, 2.0, 3.0]).reshape(1, 1, 1, 3)
expected = functional.conv2d(images, kernels, padding=(0, 1))
found = functional.conv2d(
    distribute_tensor(images, mesh, [Shard(3)]), distribute_tensor(kernels, mesh, [Replicate()]), padding=(0, 1)
)
report(expected.tolist(), found.full_tensor().tolist())
