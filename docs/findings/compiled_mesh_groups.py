# torch.compile of a mesh's get_all_groups() is an internal error, and no graph break
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 compiled_mesh_groups.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
mesh = init_device_mesh("cpu", (1, 1))


def function(x: torch.Tensor) -> object:
    return x + 1, [group.size() for group in mesh.get_all_groups()]


def told(call: object) -> str:
    try:
        return str(call(torch.ones(1)))
    except Exception as error:
        return type(error).__name__ + ": " + str(error).splitlines()[0]


expected, observed = told(function), told(torch.compile(function, backend="eager"))
print(f"rank 0: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
