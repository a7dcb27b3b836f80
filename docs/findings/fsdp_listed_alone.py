# After one of two modules in a list of fully_shard was called alone, the next step silently uses old parameters
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_listed_alone.py
# It exits with 1 where the defect is there.

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()


def sequence() -> nn.Sequential:
    """Return two layers, each of which adds up its two inputs."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for layer in model:
        nn.init.ones_(layer.weight)
    return model


def train(model: nn.Sequential) -> float:
    """Take a step, with an evaluation of the first layer alone before it ends; return what the model then gives."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        model[0](torch.ones(1, 2))
    optimizer.step()
    return model(torch.ones(1, 2)).sum().item()


sharded = sequence()
fully_shard([sharded[0], sharded[1]])
fully_shard(sharded)
expected, observed = train(sequence()), train(sharded)
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
os._exit(expected != observed)
