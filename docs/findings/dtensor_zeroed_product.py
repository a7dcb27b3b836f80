# zero_() of a DTensor with a pending product or norm raises an error
# unreported
# Seen with torch 2.15.0+cu132 and 2.14.1, gloo, Python 3.11, Linux x86-64; not there in 2.13.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_zeroed_product.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

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
product = DTensor.from_local(torch.ones(2), mesh, [Partial("product")])
try:
    observed: object = product.zero_().full_tensor().tolist()
except RuntimeError as e:
    observed = str(e).splitlines()[0]
report([0.0, 0.0], observed)
