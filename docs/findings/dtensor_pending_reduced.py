# nansum of a pending sum, and an infinity norm of a pending maximum, are silently those of its parts
# https://github.com/pytorch/pytorch/pull/176819
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_pending_reduced.py
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


mesh = init_device_mesh("cpu", (size,))


def pending(parts: list[list[float]], reduction: str) -> DTensor:
    return DTensor.from_local(torch.tensor(parts[rank]), mesh, [Partial(reduction)])


observed = [
    torch.nansum(pending([[float("nan"), 1.0], [2.0, 3.0]], "sum")),  # of nan and 4
    torch.linalg.vector_norm(pending([[-5.0, 1.0], [1.0, -7.0]], "max"), float("inf")),  # of 1 and 1
    torch.linalg.vector_norm(pending([[-5.0, 1.0], [1.0, -7.0]], "min"), float("-inf")),  # of -5 and -7
]
report([4.0, 1.0, 5.0], [x.full_tensor().item() for x in observed])
