# compiled, view() of a functional broadcast or all_reduce_coalesced of a transposed tensor raises an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_strided_functional.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def sent(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = functional.broadcast(x.t(), 0, dist.group.WORLD).view(-1)
    return result


def summed(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = functional.all_reduce_coalesced([x.t()], "sum", dist.group.WORLD)[0].view(-1)
    return result


found: list[object] = []
for compiled in False, True:
    for function in sent, summed:
        try:
            x = torch.arange(4.0).view(2, 2)
            found.append((torch.compile(function, backend="aot_eager") if compiled else function)(x).tolist())
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}"[:80])
report(found[:2], found[2:])
