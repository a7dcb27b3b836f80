# permute_tensor raises for a matrix, as it takes the number of elements for that of rows
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_permuted_matrix.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo")
rank = dist.get_rank()

try:
    observed = functional.permute_tensor(torch.full((1, 2), 1.0 + rank), [1, 0], dist.group.WORLD).tolist()
except RuntimeError as error:
    observed = str(error)
expected = [[2.0 - rank, 2.0 - rank]]
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
