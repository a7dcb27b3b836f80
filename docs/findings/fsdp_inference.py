# FSDP-replicate fails where the first forward is in inference mode
# https://github.com/pytorch/pytorch/pull/197327
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_inference.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

model = nn.Linear(1, 1, bias=False)
nn.init.ones_(model.weight)
replicate(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
try:
    with torch.inference_mode():
        observed = model(torch.full((1, 1), 1.5)).item()
except RuntimeError as e:
    observed = f"RuntimeError: {e}"
print(f"rank {rank}: expected 1.5, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == 1.5 else 1)
