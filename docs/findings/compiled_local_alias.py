# code that is compiled for a DTensor and its local tensor silently reads one of them without the change of the other
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_local_alias.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
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


mesh = init_device_mesh("cpu", (size,))


def changed_and_read(local: torch.Tensor, whole: DTensor) -> torch.Tensor:
    local.add_(1)
    return whole.to_local().sum()


def read_and_changed(whole: DTensor, local: torch.Tensor) -> torch.Tensor:
    whole.add_(1)
    return local.sum()


found = []
for compiled in False, True:
    for function in changed_and_read, read_and_changed:
        run = torch.compile(function, backend="aot_eager") if compiled else function
        local = torch.zeros(2)
        whole = DTensor.from_local(local, mesh, [Shard(0)])
        found.append(float(run(*((local, whole) if function is changed_and_read else (whole, local)))))  # type: ignore[operator]
report(found[:2], found[2:])
