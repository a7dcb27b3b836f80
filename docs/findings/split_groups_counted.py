# after the members of a group have split it, the next group of all ranks hangs
# https://github.com/pytorch/pytorch/issues/145376
# Seen with torch 2.15.0+cu132, gloo, Python 3.11, Linux x86-64. Before 2.15, split_group raises an error on the host.
# Run:  torchrun --standalone --nproc-per-node=3 split_groups_counted.py
# It exits with 1 where the defect is there: members number the next group as the fourth, and others as the third.

import sys
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
observed = "a group"
group = dist.new_group([1, 2])
dist.barrier()
try:
    if rank > 0:
        dist.split_group(group, [[0], [1]])
except RuntimeError as e:
    print(f"rank {rank}: refused: {e}")  # then it should change nothing
try:
    dist.new_group(timeout=timedelta(seconds=3))
except RuntimeError as e:
    observed = str(e).splitlines()[0]
print(f"rank {rank}: expected a group, observed {observed}", flush=True)
sys.exit(observed != "a group")
