# A functional all-gather along a negative dimension raises if the first dimension has one element
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_gather_negative.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

dist.init_process_group("gloo")
x = torch.arange(6.0).reshape(1, 2, 3)
try:
    observed = str(tuple(functional.all_gather_tensor(x, -1, dist.group.WORLD).shape))
except RuntimeError as e:
    observed = f"RuntimeError: {e}"
expected = str((1, 2, 3 * dist.get_world_size()))
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
