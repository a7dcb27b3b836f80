# SGD with nesterov and foreach=True, the default on a GPU, silently changes the gradients in its step
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 sgd_nesterov_gradients.py
# It exits with 1 where the defect is there. Where gradients are used twice, steps differ from those of foreach=False.

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


def gradients(foreach: bool) -> list[float]:
    """Return the gradient of a sharded weight before and after a step."""
    model = nn.Linear(1, size, bias=False)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5, nesterov=True, foreach=foreach)
    model(torch.ones(1, 1)).sum().backward()
    before = model.weight.grad.to_local().item()
    optimizer.step()
    return [before, model.weight.grad.to_local().item()]


report(gradients(False), gradients(True))
