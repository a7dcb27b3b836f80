# collective_utils.all_gather silently leaves out ranks at another stage, which stage names are to prevent
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 synced_stages.py
# It exits with 1 where the defect is there.

import sys

import torch.distributed as dist
from torch.distributed import collective_utils

dist.init_process_group("gloo")
rank = dist.get_rank()
try:
    observed = str(collective_utils.all_gather(rank, stage_name=f"stage {rank}", pg=dist.group.WORLD))
except RuntimeError:
    observed = "an error"
print(f"rank {rank}: expected an error, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != "an error")
