# Functional all_to_all_single (so permute_tensor) of a tensor without dimensions is a segmentation fault of every rank
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_exchange_scalar.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

expected = f"{2.0 - rank} or an error"
print(f"rank {rank}: expected {expected}", flush=True)
try:
    found = functional.permute_tensor(torch.tensor(1.0 + rank), [1, 0], dist.group.WORLD)
    # the fault: torchrun itself then ends with an exit code that is not 0
    observed = f"{functional.wait_tensor(found).item()} or an error"
except (RuntimeError, IndexError):
    observed = expected  # dist.all_to_all_single raises IndexError for these split sizes
print(f"rank {rank}: observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
