# The gradients of the differentiable reduce and reduce_scatter with an average are silently those of a sum
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 differentiable_average.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable

dist.init_process_group("gloo")
observed = {}
x = torch.ones(2, requires_grad=True)
differentiable.reduce(x, 0, dist.ReduceOp.AVG).sum().backward()
observed["reduce"] = x.grad.tolist()
x = torch.ones(2, requires_grad=True)
differentiable.reduce_scatter(torch.empty(1), list(x.split(1)), dist.ReduceOp.AVG).sum().backward()
observed["reduce_scatter"] = x.grad.tolist()
expected = {"reduce": [0.5, 0.5], "reduce_scatter": [0.5, 0.5]}
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
