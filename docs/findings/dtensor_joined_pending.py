# cat and stack of DTensors that are pending with different reductions raise an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64; not there in 2.14.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_joined_pending.py
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
one, other = (DTensor.from_local(torch.tensor([1.0]) + rank, mesh, [Partial(kind)]) for kind in ("sum", "max"))
try:
    observed: object = torch.cat([one, other]).full_tensor().tolist()  # type: ignore[attr-defined]
except AssertionError as e:
    observed = str(e).splitlines()[0]
report([3.0, 2.0], observed)
