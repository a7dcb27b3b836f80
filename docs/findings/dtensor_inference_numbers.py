# In inference mode, item(), float(), int() and bool() of a DTensor raise RuntimeError: aten._local_scalar_dense.default
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_inference_numbers.py
# It exits with 1 where the defect is there.

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
with torch.inference_mode():
    x = distribute_tensor(torch.tensor(3.0), mesh, [Replicate()])
    try:
        observed: object = x.item()
    except RuntimeError as error:
        observed = str(error).splitlines()[0]
report(3.0, observed)
