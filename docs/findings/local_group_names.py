# a group that only its members make hangs if they have made different numbers of such groups before
# https://github.com/pytorch/pytorch/issues/173608
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=3 local_group_names.py
# It exits with 1 where the defect is there: the name of a group depends on how many groups a rank has.

import sys
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
observed = "a group"
for ranks in ([1, 2], [0, 1]):  # all ranks have the same order
    try:
        dist.new_group(ranks, use_local_synchronization=True, timeout=timedelta(seconds=3))
    except RuntimeError as e:
        observed = str(e).splitlines()[0]
print(f"rank {rank}: expected a group, observed {observed}", flush=True)
sys.exit(observed != "a group")
