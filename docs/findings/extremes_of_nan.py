# MAX and MIN over ranks of which one has NaN lose the numbers of other ranks
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=3 extremes_of_nan.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

tensor = torch.tensor([float("nan") if rank == 1 else rank + 1.0])  # 1, NaN, 3
dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
observed = tensor.item()
print(f"rank {rank}: expected nan or 3.0, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed != observed or observed == 3.0 else 1)
