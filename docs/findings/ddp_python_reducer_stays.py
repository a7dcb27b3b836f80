# Once a DDP module has the reducer in Python, static graphs of other modules can't be compiled any more
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 ddp_python_reducer_stays.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
    DistributedDataParallel(nn.Linear(2, 2))  # which is not used
model = DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
observed = "a step"
try:
    torch.compile(model, backend="eager")(torch.ones(2, 2)).sum().backward()
except TypeError as error:
    observed = f"{type(error).__name__}: {error}"
print(f"rank {dist.get_rank()}: expected a step, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != "a step")
