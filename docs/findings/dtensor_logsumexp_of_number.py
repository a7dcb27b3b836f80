# logsumexp over dimension 0 or -1 of a DTensor without dimensions raises an error (before torch 2.14)
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_logsumexp_of_number.py
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


x = distribute_tensor(torch.tensor(3.0), init_device_mesh("cpu", (size,)), [Replicate()])
try:
    observed = x.logsumexp(0).full_tensor().item()
except RuntimeError as error:
    observed = str(error).splitlines()[0]
report(3.0, observed)
