# collective_utils.broadcast takes a group's rank for one of the world: it raises in groups without the first ranks
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 synced_group.py
# It exits with 1 where the defect is there.

import sys

import torch.distributed as dist
from torch.distributed import collective_utils

dist.init_process_group("gloo")
group = dist.new_group([1])
observed = "7"
if dist.get_rank() == 1:
    try:
        observed = str(collective_utils.broadcast(7, rank=0, pg=group))
    except ValueError as error:
        observed = f"ValueError: {error}"
print(f"rank {dist.get_rank()}: expected 7, observed {observed}", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(observed != "7")
