# The gradient of torch.sgn of a DTensor is a plain tensor of the whole shape, which optimizers refuse
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_sgn_gradient.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
weight = distribute_tensor(torch.arange(4.0) - 1, mesh, [Shard(0)]).requires_grad_()
torch.sgn(weight).sum().backward()
observed = f"a {type(weight.grad).__name__} of shape {tuple(weight.grad.shape)}"
try:
    torch.optim.SGD([weight], lr=0.1).step()
except RuntimeError as error:
    observed += f", and in the step: {str(error).splitlines()[0]}"
expected = "a DTensor of shape (4,)"
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
