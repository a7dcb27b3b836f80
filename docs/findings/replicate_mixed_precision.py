# replicate() takes DDP's mixed precision, casts the inputs, and not the parameters
# https://github.com/pytorch/pytorch/pull/173505
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_mixed_precision.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel.distributed import _MixedPrecision

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

try:
    model = replicate(nn.Linear(1, 1, bias=False), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    observed = str(model(torch.ones(1, 1)).dtype)
except NotImplementedError:
    observed = "refused"
except RuntimeError as e:
    observed = f"RuntimeError: {e}"
print(f"rank {rank}: expected torch.bfloat16 or refused, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed in ("torch.bfloat16", "refused") else 1)
