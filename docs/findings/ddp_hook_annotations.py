# DDP refuses a communication hook whose annotations are strings, as with `from __future__ import annotations`
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 ddp_hook_annotations.py
# It exits with 1 where the defect is there.

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = torch.futures.Future()
    future.set_result(bucket.buffer() * 4)
    return future


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
try:
    model.register_comm_hook(None, hook)
    observed = "registered"
except ValueError as error:
    observed = str(error)
expected = "registered"
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
