# With a fused optimizer, ShardedGradScaler does not tell other ranks of infinities: ranks skip steps and scale alone
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 scaler_fused.py
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
before = [p.detach().clone() for p in model.parameters()]
scaler.scale(model(torch.ones(2, 4)).sum()).backward()
if rank == 0:
    for p in model.parameters():
        p.grad[0] = float("inf")
scaler.step(optimizer)
scaler.update()
skipped = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
report((True, 2.0), (skipped, scaler.get_scale()))
