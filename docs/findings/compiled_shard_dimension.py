# torch.compile of redistribute to Shard(dim) is an internal error once dim has become dynamic: at its second value
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_shard_dimension.py
# It exits with 1 where the defect is there.

import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

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


def cut(x: torch.Tensor, dim: int) -> torch.Tensor:
    return DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(dim)]).to_local()


compiled = torch.compile(cut, backend="eager")


def told(call: Callable[..., torch.Tensor], dim: int) -> object:
    try:
        return tuple(call(torch.ones(2, 2, 2, 2), dim).shape)
    except Exception as error:
        return type(error).__name__ + ": " + str(error).strip().splitlines()[0]


report(*([told(call, dim) for dim in (1, 2, 3)] for call in (cut, compiled)))
