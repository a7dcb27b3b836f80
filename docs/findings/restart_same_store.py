# a default group that was destroyed can't be started again on the same store where a rank is late
# https://github.com/pytorch/pytorch/issues/55967
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 restart_same_store.py
# It exits with 1 where the defect is there.

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.PrefixStore("restarts", dist.TCPStore(*address, is_master=False))

sums: list[object] = []
for cycle in range(6):
    if rank == cycle % 2:
        time.sleep(0.2)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=2))
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        sums.append(tensor.item())
        dist.destroy_process_group()
    except RuntimeError as e:
        sums.append(f"RuntimeError: {str(e).splitlines()[0]}")
        break
expected = [float(size)] * 6
print(f"rank {rank}: expected {expected}, observed {sums}", flush=True)
sys.exit(sums != expected)
