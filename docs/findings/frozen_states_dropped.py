# set_optimizer_state_dict silently drops the saved states of parameters that are frozen while it loads
# https://github.com/pytorch/pytorch/issues/192202
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 frozen_states_dropped.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


model = nn.Linear(2, 2)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
model.weight.requires_grad_(False)
saved = get_optimizer_state_dict(model, optimizer)  # both states
fresh = torch.optim.AdamW(model.parameters())
set_optimizer_state_dict(model, fresh, saved)
report([0, 1], sorted(fresh.state_dict()["state"]))
