# gradients that zero_grad() removed come back when a module under FSDP1 is moved, and the next backward adds to them
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_gradients_return.py
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


cpu = torch.device("cpu")
model = FullyShardedDataParallel(nn.Linear(4, 1, bias=False), device_id=cpu, use_orig_params=True)
model(torch.ones(4)).sum().backward()
model.zero_grad()
model.to("cpu")  # where it is already
found = [p.grad is None for p in model.parameters()]
model(torch.ones(4)).sum().backward()
observed = found, [p.grad.tolist() for p in model.parameters() if p.grad is not None]
report(([True], [[1.0, 1.0]]), observed)
