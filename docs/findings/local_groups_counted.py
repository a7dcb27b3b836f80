# after a group that only its members make, the next group of all ranks hangs
# unreported
# Seen with torch 2.15.0+cu132 and 2.14.1, gloo, Python 3.11, Linux x86-64; not there in 2.13.
# Run:  torchrun --standalone --nproc-per-node=3 local_groups_counted.py
# It exits with 1 where the defect is there: members number the next group as the third, and others as the second.

import sys
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
observed = "a group"
dist.new_group([1, 2], use_local_synchronization=True)
try:
    dist.new_group(timeout=timedelta(seconds=3))
except RuntimeError as e:
    observed = str(e).splitlines()[0]
print(f"rank {rank}: expected a group, observed {observed}", flush=True)
sys.exit(observed != "a group")
