# if a function fails on a rank, collective_utils.all_gather raises a TypeError in place of its RuntimeError
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 synced_error.py
# It exits with 1 where the defect is there.

import sys

import torch.distributed as dist
from torch.distributed import collective_utils

dist.init_process_group("gloo")
try:
    observed = str(collective_utils.all_gather(lambda: 1 // dist.get_rank(), pg=dist.group.WORLD))
except (RuntimeError, TypeError) as error:
    observed = f"{type(error).__name__}: {error}"
print(f"expected a RuntimeError about a division by zero, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(not observed.startswith("RuntimeError"))
