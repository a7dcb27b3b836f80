# After a block of join(), DDP still sends the messages of join, so that a forward on one rank alone hangs
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 ddp_after_join.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
with model.join():
    for _ in range(1 + rank):
        model(torch.ones(1, 1)).sum().backward()
if rank == 0:
    with torch.no_grad():
        model(torch.ones(1, 1))  # as for validation on one rank; DDP needs no messages for it
total = torch.tensor([10.0 + rank])
try:
    dist.all_reduce(total)
    observed = total.item()
except RuntimeError as error:
    observed = str(error)[:80]
expected = 21.0
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
sys.stdout.flush()
if observed == expected:
    dist.destroy_process_group()
sys.exit(observed != expected)
