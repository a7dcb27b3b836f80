# After the default group was destroyed and made anew, compiled dist.get_rank() is that of the old one
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_stale_rank.py
# It exits with 1 where the defect is there.

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

limit = timedelta(seconds=20)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore("localhost", int(os.environ["MASTER_PORT"]) + 1, size, rank == 0, limit)


@torch.compile(backend="eager")
def function(x: torch.Tensor) -> torch.Tensor:
    return x + dist.get_rank()


observed = []
for time, me in enumerate((rank, size - 1 - rank)):  # in reverse the second time
    dist.init_process_group("gloo", store=dist.PrefixStore(str(time), store), rank=me, world_size=size, timeout=limit)
    observed.append((me, function(torch.zeros(1)).item()))
    dist.barrier()
    dist.destroy_process_group()
print(f"rank {rank}: the group's rank, and what compiled code took it for, twice: {observed}", flush=True)
sys.exit(any(right != found for right, found in observed))
