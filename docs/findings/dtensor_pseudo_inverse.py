# linalg.pinv of a complex DTensor is silently wrong, also of a replicated one, if the matrix is not hermitian
# https://github.com/pytorch/pytorch/issues/198118
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_pseudo_inverse.py
# It exits with 1 where the defect is there. Lazy conjugates that the operator makes inside are not resolved there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
matrix = torch.tensor([[1 + 0j, 2j], [0j, 1 + 0j]])
inverse = torch.tensor([[1 + 0j, -2j], [0j, 1 + 0j]])
found = torch.linalg.pinv(distribute_tensor(matrix, mesh, [Replicate()])).to_local()
print(f"rank {dist.get_rank()}: expected {inverse.tolist()}, observed {found.tolist()}", flush=True)
dist.destroy_process_group()
sys.exit(not torch.allclose(found, inverse, atol=1e-4))
