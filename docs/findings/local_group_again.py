# after a group that only its members make was destroyed, the next one of the same ranks hangs
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64; not there in 2.14.
# Run:  torchrun --standalone --nproc-per-node=2 local_group_again.py
# It exits with 1 where the defect is there: the new group has the name of the old one, under which it finds old keys.

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
observed = "8 groups"
try:
    for _ in range(8):
        group = dist.new_group([0, 1], use_local_synchronization=True, timeout=timedelta(seconds=3))
        dist.all_reduce(torch.ones(1), group=group)
        time.sleep(0.2 * rank)  # ranks are not in step
        dist.destroy_process_group(group)
except RuntimeError as e:
    observed = str(e).splitlines()[0]
print(f"rank {rank}: expected 8 groups, observed {observed}", flush=True)
os._exit(observed != "8 groups")
