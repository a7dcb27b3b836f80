# After a step that follows a forward without a backward, the next forward under FSDP1 uses old parameters
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_stale_root.py
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


model = FullyShardedDataParallel(nn.Linear(2, 1, bias=False), device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(1.0)
model(torch.ones(1, 2)).sum().backward()
with torch.no_grad():
    model(torch.ones(1, 2))  # an evaluation, after which the root stays unsharded
optimizer.step()  # each weight becomes 0.75
report(1.5, model(torch.ones(1, 2)).item())
