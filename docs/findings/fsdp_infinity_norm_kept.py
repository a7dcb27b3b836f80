# FSDP1's clip_grad_norm_ silently uses an earlier, larger infinity norm if a rank has no gradients of its own
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_infinity_norm_kept.py
# It exits with 1 where the defect is there.

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

warnings.simplefilter("ignore")
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

layer = nn.Linear(1, 1, bias=False)  # its only number is on the first rank
model = FullyShardedDataParallel(layer, use_orig_params=True, device_id=torch.device("cpu"))
expected, observed = [8.0, 2.0, 2.0], []
for size, norm in (8.0, float("inf")), (2.0, float("inf")), (2.0, 2.0):
    model.zero_grad()
    model(torch.full((1, 1), size)).sum().backward()
    observed.append(model.clip_grad_norm_(4.0, norm).item())
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
