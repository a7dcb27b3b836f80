# copy.deepcopy of the result of a functional collective raises an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_deepcopy.py
# It exits with 1 where the defect is there.

import copy
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
state = {"total": functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)}
try:
    observed: object = copy.deepcopy(state)["total"].tolist()
except RuntimeError as error:
    observed = str(error)
expected = [size, size]
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
