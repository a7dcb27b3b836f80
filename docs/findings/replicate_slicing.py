# A slice of a replicated container is a module that was never initialised
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 replicate_slicing.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
model = replicate(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
try:
    observed = f"a container of {len(model[:1])}"
except AttributeError as e:
    observed = f"AttributeError: {e}"
print(f"expected a container of 1, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == "a container of 1" else 1)
