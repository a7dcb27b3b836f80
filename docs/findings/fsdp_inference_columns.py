# The first forward of a module under fully_shard with Shard(1) fails in inference mode
# https://github.com/pytorch/pytorch/pull/197327
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_inference_columns.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

model = nn.Linear(2, 1, bias=False)
nn.init.ones_(model.weight)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=lambda p: Shard(1))
try:
    with torch.inference_mode():
        observed = model(torch.full((1, 2), 1.5)).item()
except RuntimeError as e:
    observed = f"RuntimeError: {e}"
print(f"rank {rank}: expected 3.0, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != 3.0)
