# set_optimizer_state_dict takes all settings from a group without parameters unless it is the last one
# https://github.com/pytorch/pytorch/issues/143828
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 empty_group_in_between.py
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


def made(factor: float) -> torch.optim.Optimizer:
    """Return an optimizer with three groups of different rates; the second one is empty."""
    groups = [[model.weight], [], [model.bias]]
    return torch.optim.AdamW([{"params": group, "lr": factor * (i + 1)} for i, group in enumerate(groups)])


fresh = made(8.0)
set_optimizer_state_dict(model, fresh, get_optimizer_state_dict(model, made(1.0)))
report([1.0, 2.0, 3.0], [group.get("lr") for group in fresh.param_groups])
