# A layer that is frozen after an evaluation is silently trained if reshard_after_forward is False or an integer
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 fsdp_frozen_after_evaluation.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
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


trained: dict[object, list[bool]] = {}
for value in True, False, 2:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, reshard_after_forward=value)
    fully_shard(model)
    with torch.no_grad():
        model(torch.ones(1, 4))
    model[0].requires_grad_(False)
    trained[value] = []
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        trained[value].append(model[0].weight.grad is not None)
        model.zero_grad()
report({value: [False, False] for value in trained}, trained)
