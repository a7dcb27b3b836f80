# Compiled code silently ignores the __defaults__ that it gives to a function which it made
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_function_defaults.py
# It exits with 1 where the defect is there.

import sys
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


def step(x: torch.Tensor) -> torch.Tensor:
    def scaled(x: torch.Tensor, by: int = 2) -> torch.Tensor:
        return x * by

    scaled.__defaults__ = (5,)
    return scaled(x)


outcomes = []
for call in step, torch.compile(step, backend="eager"):
    result = call(torch.ones(1))
    dist.all_reduce(result)
    outcomes.append((result / size).item())
report(*outcomes)
