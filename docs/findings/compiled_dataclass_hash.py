# In compiled code, the hash of a frozen dataclass silently has the fields with compare=False, so equal keys are two
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_dataclass_hash.py
# It exits with 1 where the defect is there.

import sys
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Key:
    """A name with a comment that does not count."""

    name: str
    comment: str = field(default="", compare=False)


def step(x: torch.Tensor) -> torch.Tensor:
    table = {Key("a"): x}
    table[Key("a", "again")] = x + 1
    return x * len(table)


outcomes = []
for call in step, torch.compile(step, backend="eager"):
    result = call(torch.ones(1))
    dist.all_reduce(result)
    outcomes.append((result / size).item())
report(*outcomes)
