# In compiled code, OrderedDict.move_to_end(module, False) silently moves to the end
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_moved_to_front.py
# It exits with 1 where the defect is there.

import sys
from collections import OrderedDict
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)


def step(x: torch.Tensor) -> list[torch.Tensor]:
    order: OrderedDict[torch.nn.Module, torch.Tensor] = OrderedDict()
    order[first], order[second] = x + 1, x + 2
    order.move_to_end(second, False)
    return list(order.values())


calls = step, torch.compile(step, backend="eager")
report(*([each.item() for each in call(torch.ones(1) * rank)] for call in calls))
