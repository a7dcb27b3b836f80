# DDP refuses a communication hook that is a partial function or an object with __call__: AttributeError
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 ddp_hook_callables.py
# It exits with 1 where the defect is there.

import functools
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def hook(factor, state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer() * factor)
    return future


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
try:
    model.register_comm_hook(None, functools.partial(hook, 4))
    observed = "registered"
except AttributeError as error:
    observed = str(error)
expected = "registered"
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
