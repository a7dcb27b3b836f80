# After a forward without gradients the next one computes with parameters from before the optimizer's step
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_stale_parameters.py
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)

model(torch.ones(1, 1)).sum().backward()
with torch.no_grad():
    model(torch.ones(1, 1))  # leaves the copies of parameters that it computed with in place
optimizer.step()  # 2 - 0.25
observed = model(torch.ones(1, 1)).item()
print(f"rank {rank}: expected 1.75, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == 1.75 else 1)
