# torch.compile of init_device_mesh is an internal error, and no graph break
# https://github.com/pytorch/pytorch/issues/152447 (another error then)
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_mesh.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def function(x: torch.Tensor) -> torch.Tensor:
    return x + init_device_mesh("cpu", (size,)).get_local_rank()


try:
    observed = str(torch.compile(function, backend="eager")(torch.zeros(1)).item())
except Exception as error:
    observed = type(error).__name__ + ": " + str(error).splitlines()[0]
print(f"rank {rank}: expected {float(rank)}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != str(float(rank)))
