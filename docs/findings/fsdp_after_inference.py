# After a first forward in inference mode, a model replicated on FSDP2 can't be trained
# unreported
# Seen with torch 2.15.0+cu132, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_after_inference.py
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
        model(torch.full((1, 1), 1.5))
except RuntimeError as e:  # before 2.15, this forward fails: fsdp_inference
    print(f"rank {rank}: {e}", flush=True)
    dist.destroy_process_group()
    sys.exit(0)
output = model(torch.full((1, 1), 1.5)).sum()
try:
    output.backward()
    observed = model.weight.grad.full_tensor().item()
except RuntimeError as e:
    observed = f"RuntimeError: {e}"
print(f"rank {rank}: expected 1.5, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == 1.5 else 1)
