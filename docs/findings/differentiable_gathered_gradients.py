# The differentiable all_gather silently takes the elements of a transposed incoming gradient in another order
# https://github.com/pytorch/pytorch/issues/192920 (gloo's scatter, by which they are exchanged, ignores strides)
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 differentiable_gathered_gradients.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable

dist.init_process_group("gloo")
x = torch.zeros(2, 3, requires_grad=True)
weights = torch.arange(6.0).reshape(3, 2)
sum((part.t() * weights).sum() for part in differentiable.all_gather(x)).backward()
observed = x.grad.tolist()
expected = (weights.t() * dist.get_world_size()).tolist()
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
