# pools, interpolate and batch_norm of a DTensor raise on a rank without channels alone
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=3 dtensor_images_without_channels.py
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
images = distribute_tensor(torch.ones(2, 4, 6, 6), mesh, [Shard(1)])  # two channels for each of two ranks
observed = {}
for name, operator in {
    "max_pool2d": lambda x: functional.max_pool2d(x, 2),
    "avg_pool2d": lambda x: functional.avg_pool2d(x, 2),
    "interpolate": lambda x: functional.interpolate(x, scale_factor=2),
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
}.items():
    try:
        operator(images)
    except RuntimeError as error:
        observed[name] = str(error).splitlines()[0]
raised = torch.tensor([float(len(observed))])
dist.all_reduce(raised, dist.ReduceOp.MIN)
report(raised.item() > 0, bool(observed))
