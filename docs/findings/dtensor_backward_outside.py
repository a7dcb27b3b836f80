# a backward through DTensors raises an error on a rank outside their mesh
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_backward_outside.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh, observed = DeviceMesh("cpu", [0]), []
for total in False, True:
    local = torch.ones(2, 3, requires_grad=True)
    x = DTensor.from_local(local, mesh, [Shard(0)]) * 2
    try:
        (x.sum() if total else x).to_local().sum().backward()
        observed.append("no error")
    except RuntimeError as error:
        observed.append(str(error))
report(["no error", "no error"], observed)
