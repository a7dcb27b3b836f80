# at debug level DETAIL, collectives are refused as different after a message between some of the ranks
# https://github.com/pytorch/pytorch/issues/148976
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=3 debug_level_messages.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.set_debug_level(dist.DebugLevel.DETAIL)
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

tensor = torch.ones(1)
if rank == 0:
    dist.send(tensor, 1)
elif rank == 1:
    dist.recv(tensor, 0)
observed: object
try:
    dist.all_reduce(tensor)
    observed = tensor.item()
except RuntimeError as e:
    observed = f"RuntimeError: {str(e).splitlines()[0]}"
print(f"rank {rank}: expected 3.0, observed {observed}", flush=True)
sys.exit(0 if observed == 3.0 else 1)
