# a module under FSDP1 that is converted to another dtype after its first forward fails in the next one
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_converted_later.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


model = FullyShardedDataParallel(nn.Linear(3, 5), device_id=torch.device("cpu"))
model(torch.ones(2, 3)).sum().backward()
model.zero_grad()
model.double()
try:
    observed: object = model(torch.ones(2, 3, dtype=torch.float64)).dtype
except (AssertionError, RuntimeError, ValueError) as e:
    observed = f"{type(e).__name__}: {e}"
report(torch.float64, observed)
