# After unscale_() of ShardedGradScaler, a fused Adam raises RuntimeError
# https://github.com/pytorch/pytorch/issues/140514
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 scaler_fused_unscaled.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


model = FullyShardedDataParallel(nn.Linear(4, 4, bias=False), device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.Adam(model.parameters(), fused=True)
scaler = ShardedGradScaler("cpu", init_scale=4.0)
scaler.scale(model(torch.ones(2, 4)).sum()).backward()
scaler.unscale_(optimizer)
try:
    scaler.step(optimizer)
    found = "stepped"
except RuntimeError as error:
    found = str(error)
report("stepped", found)
