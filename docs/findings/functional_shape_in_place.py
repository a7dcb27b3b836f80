# The result of a functional collective silently keeps its old shape after unsqueeze_, squeeze_ or t_
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_shape_in_place.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo")
rank = dist.get_rank()

result = functional.all_reduce(torch.ones(1, 3), "sum", dist.group.WORLD)
result.unsqueeze_(0)
observed, expected = [tuple(result.shape), tuple((result + 0).shape)], [(1, 1, 3), (1, 1, 3)]
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
