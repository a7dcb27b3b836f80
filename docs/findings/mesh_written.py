# Writes to the tensor of which a DeviceMesh was made, or to its attribute mesh, silently change the mesh
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 mesh_written.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

dist.init_process_group("gloo")
given = torch.arange(2, dtype=torch.int32)
first, second = DeviceMesh("cpu", given), DeviceMesh("cpu", [0, 1])
given.add_(7)
second.mesh.add_(7)
observed = [first.mesh.tolist(), second.mesh.tolist()]
print(f"rank {dist.get_rank()}: expected {[[0, 1], [0, 1]]}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != [[0, 1], [0, 1]])
