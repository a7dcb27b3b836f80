# amax, amin, mean, prod and any with out= raise an error for every DTensor, although they worked before torch 2.14
# unreported
# Seen with torch 2.15.0+cu132 and 2.14.1, gloo, Python 3.11, Linux x86-64; not there in 2.13.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_out_of_a_reduction.py
# It exits with 1 where the defect is there: "Strategy length 2 != expected 3".

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

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
x, out = (distribute_tensor(t, mesh, [Replicate()]) for t in (torch.arange(8.0).view(2, 4), torch.zeros(4)))
try:
    observed: object = torch.amax(x, 0, out=out).full_tensor().tolist()
except RuntimeError as e:
    observed = str(e).splitlines()[0]
report([4.0, 5.0, 6.0, 7.0], observed)
