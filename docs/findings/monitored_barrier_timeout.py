# monitored_barrier without a timeout ignores that of its group, which it documents, and waits for 30 minutes
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 monitored_barrier_timeout.py
# It exits with 1 where the defect is there.

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()
group = dist.new_group(timeout=timedelta(seconds=1))
expected, observed = "an error" if rank == 0 else "passed, or an error", "passed"
if rank:
    time.sleep(4)  # too late for the group
try:
    dist.monitored_barrier(group)
except RuntimeError:
    observed = "an error"
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
bad = torch.tensor([float(observed not in expected)])
dist.all_reduce(bad)
dist.destroy_process_group()
sys.exit(1 if bad.item() else 0)
