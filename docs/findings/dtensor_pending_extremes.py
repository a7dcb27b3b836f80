# nan_to_num, threshold or irfft of a pending maximum is silently the maximum of what it makes of the parts
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_pending_extremes.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional

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


def pending(parts: list[list[float]], dtype: torch.dtype = torch.float32) -> DTensor:
    return DTensor.from_local(torch.tensor(parts[rank], dtype=dtype), mesh, [Partial("max")])


observed = [
    torch.nan_to_num(pending([[float("inf"), 1.0], [3.0, 7.0]]), posinf=0.0),  # of inf and 7
    functional.threshold(pending([[-5.0, 1.0], [1.0, -7.0]]), 0.5, 2.0),  # of 1 and 1
    torch.fft.irfft(pending([[0.0, 4.0], [4.0, 0.0]])),  # of 4 and 4
]
report([[0.0, 7.0], [1.0, 1.0], [4.0, 0.0]], [x.full_tensor().tolist() for x in observed])
