# With DDP's reducer in Python, backwards that are not compiled silently don't wait for fp16_compress_hook
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 ddp_python_reducer_compressed.py
# It exits with 1 where the defect is there.

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
torch._dynamo.config.optimize_ddp = "python_reducer"
model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
model.register_comm_hook(None, fp16_compress_hook)
output = model(torch.full((1, 2), 1.0 + rank)).sum()
dist.barrier()
if rank == 1:
    time.sleep(0.5)
output.backward()
observed = model.module.weight.grad[0].tolist()
print(f"rank {rank}: expected [1.5, 1.5], observed {observed}", flush=True)
dist.barrier()
os._exit(rank == 0 and observed != [1.5, 1.5])  # rank 1 was late, and may find the average
