# fully_shard and FSDP-replicate raise an error for a module with a frozen parameter of integers
# unreported
# Seen with torch 2.11.0+cu130, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_frozen_integers.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
model = nn.Linear(2, 2)
model.numbers = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
observed = "a module"
try:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
except RuntimeError as error:
    observed = f"{type(error).__name__}: {error}"
print(f"rank {dist.get_rank()}: expected a module, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != "a module")
