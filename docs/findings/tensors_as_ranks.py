# a group that new_group makes of ranks that are integer tensors can't be used by its members
# https://github.com/pytorch/pytorch/issues/72346
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tensors_as_ranks.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

observed: object
try:
    group = dist.new_group(torch.arange(2))
except (TypeError, ValueError):
    observed = "refused by new_group"
else:
    tensor = torch.tensor([float(rank)])
    try:
        dist.broadcast(tensor, 1, group=group)
        observed = (dist.get_rank(group), tensor.item())
    except ValueError as e:
        observed = f"ValueError: {str(e)[:35]}"
right = ("refused by new_group", (rank, 1.0))
print(f"rank {rank}: expected {right[1]} or {right[0]}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed in right else 1)
