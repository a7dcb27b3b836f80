# get_optimizer_state_dict before the first step counts as a step with a rate of 0: later updates are wrong, silently
# https://github.com/pytorch/pytorch/issues/164929
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 state_dict_counts_a_step.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
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


def count(read: bool) -> float:
    """Return the step count after one step."""
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if read:
        get_optimizer_state_dict(model, optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return float(optimizer.state[model.weight]["step"])


def updated(read: bool) -> float:
    """Return the weight after one step of Rprop, which begins with the rate as the size of its steps."""
    weight = nn.Parameter(torch.ones(1))
    model = nn.ParameterDict({"weight": weight})
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.5)
    if read:
        get_optimizer_state_dict(model, optimizer)
    weight.square().sum().backward()
    optimizer.step()
    return round(weight.item(), 4)


report([1.0, 1.0, 0.5, 0.5], [count(False), count(True), updated(False), updated(True)])
