# The gradient of to_local can't be compiled for a DTensor cut to a size that is read from a tensor
# https://github.com/pytorch/pytorch/pull/187025
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_sizes_from_data.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch._dynamo.config
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


torch._dynamo.config.capture_scalar_outputs = True


def cut(x, count):
    columns = count.item()
    torch._check(columns >= 2)
    torch._check(columns <= 4)
    return x[:, :columns].to_local() * 2


x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (size,)), [Shard(0)]).requires_grad_()
try:
    torch.compile(cut, backend="aot_eager", fullgraph=True)(x, torch.tensor(3)).sum().backward()
    found: object = x.grad.full_tensor()[0].tolist()
except RuntimeError as error:
    found = repr(error)
report([2.0, 2.0, 2.0, 0.0], found)
