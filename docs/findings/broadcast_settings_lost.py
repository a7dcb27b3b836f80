# broadcast_from_rank0 of an optimizer's state silently loses settings that other ranks' optimizers do not have
# https://github.com/pytorch/pytorch/issues/126948
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 broadcast_settings_lost.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, after a step."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


model, optimizer = made()
torch.optim.lr_scheduler.StepLR(optimizer, 1)

options = StateDictOptions(full_state_dict=True, cpu_offload=True)
state = get_optimizer_state_dict(model, optimizer, options=options)  # rank 0 has it, and others nothing
model, optimizer = made()
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_optimizer_state_dict(model, optimizer, state, options=options)
report(0.001, optimizer.param_groups[0].get("initial_lr"))
