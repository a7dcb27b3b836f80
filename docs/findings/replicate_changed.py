# Parameters that are assigned, cast or thawed after the first forward are not averaged, without an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_changed.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()


def gradients(change) -> list[float] | str:
    """After one step, a change, and a backward in which rank i has i + 1 for every gradient."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model[1].requires_grad_(change is not thaw)
    replicate(model)
    model(torch.ones(1, 1)).sum().backward()
    change(model)
    model.zero_grad()
    try:
        model(torch.full((1, 1), 1.0 + rank, dtype=model[0].weight.dtype)).sum().backward()
    except RuntimeError as e:
        return f"RuntimeError: {e}"
    return [parameter.grad.item() for parameter in model.parameters()]


def assign(model) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def cast(model) -> None:
    model.double()


def thaw(model) -> None:
    model[1].requires_grad_(True)


wrong = 0
for change in (assign, cast, thaw):
    observed = gradients(change)
    print(f"rank {rank}: {change.__name__}: expected [1.5, 1.5] or an error, observed {observed}", flush=True)
    wrong += observed != [1.5, 1.5] and not isinstance(observed, str)
dist.destroy_process_group()
sys.exit(1 if wrong else 0)
