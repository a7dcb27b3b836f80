# torch.min and others with out= silently write into a DTensor as into that of an earlier call in other placements
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_out_of_earlier_call.py
# It exits with 1 where the defect is there.

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

warnings.simplefilter("ignore")  # of an output that is resized, where the defect is there
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
x = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Replicate()])
observed = []
for placement in Replicate(), Shard(0):
    values, places = (distribute_tensor(torch.zeros(3, dtype=t), mesh, [placement]) for t in (x.dtype, torch.int64))
    try:
        torch.min(x, 0, out=(values, places))
    except NotImplementedError:
        print("this version has no rule for it")
        sys.exit(0)
    observed.append(values.full_tensor().tolist())
report([[0.0, 1.0, 2.0]] * 2, observed)
