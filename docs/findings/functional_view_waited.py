# wait() of a view of a functional collective's result silently gives a tensor without a gradient
# unreported; https://github.com/pytorch/pytorch/issues/151240 is about uses of such results
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_view_waited.py
# It exits with 1 where the defect is there.

import os

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor_autograd

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
gathered = all_gather_tensor_autograd(x, 0, dist.group.WORLD)
flat = gathered.view(-1)
observed = {"result": gathered.wait().requires_grad, "view": flat.wait().requires_grad}
print(f"rank {rank}: requires_grad after wait(): expected True for both, observed {observed}", flush=True)
os._exit(not all(observed.values()))
