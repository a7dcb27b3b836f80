# A module under fully_shard that is converted to another dtype after its first forward fails in the next one
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_cast_later.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
wrong = False
for when in ("before", "after"):
    model = nn.Linear(4, 4)
    fully_shard(model)
    if when == "after":
        model(torch.ones(1, 4)).sum().backward()
        model.zero_grad()
    model.to(torch.float64)
    expected = torch.float64
    try:
        observed: object = model(torch.ones(1, 4, dtype=torch.float64)).dtype
    except RuntimeError as error:
        observed = f"RuntimeError: {error}"
    wrong |= observed != expected
    print(f"rank {dist.get_rank()}: {when} a step: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(wrong)
