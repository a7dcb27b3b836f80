# A communication hook that returns None is a segmentation fault
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_hook_none.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
model.register_comm_hook(None, lambda state, bucket: None)
expected = observed = "an error"
try:
    # the fault: torchrun itself then ends with an exit code that is not 0
    model(torch.full((1, 1), 1.0 + rank)).sum().backward()
    observed = "no error"
except (AttributeError, RuntimeError, TypeError) as e:
    print(f"rank {rank}: {e}", flush=True)
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == expected else 1)
