# What is written into parameters after a forward without gradients is lost, without an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_written_parameters.py
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
nn.init.constant_(model.weight, 2.0)
replicate(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
with torch.no_grad():
    model(torch.ones(1, 1))  # leaves plain parameters in the place of those that are trained
    for parameter in model.parameters():
        parameter.fill_(5.0)
model(torch.ones(1, 1)).sum().backward()
observed = model.weight.full_tensor().item()
print(f"rank {rank}: expected 5.0, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == 5.0 else 1)
