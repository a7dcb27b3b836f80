# Functional collectives refuse a list of lists of ranks as a group, which they document: ValueError without a message
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_group_lists.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo")
rank = dist.get_rank()

try:
    observed = functional.all_reduce(torch.ones(1), "sum", [[0, 1]]).tolist()
except ValueError as error:
    observed = repr(error)
expected = [2.0]
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
