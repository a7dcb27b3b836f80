# Compiled code that copies, merges or unpacks a dict, or calls f(**d), silently keeps the order of the first one
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_order_of_dicts.py
# It exits with 1 where the defect is there.

import sys
from collections.abc import Callable
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


def joined(**tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat([*tensors.values()])


steps: dict[str, Callable[..., torch.Tensor]] = {
    "iterated": lambda d: torch.cat([d[name] for name in d]),
    "copied": lambda d: torch.cat([*d.copy().values()]),
    "merged": lambda d: torch.cat([*{**d}.values()]),
    "keywords": lambda d: joined(**d),
    "popitem": lambda d: d.popitem()[1],
}
expected, observed = {}, {}
for name, step in steps.items():
    torch.compiler.reset()
    for found, call in (expected, step), (observed, torch.compile(step, backend="eager")):
        found[name] = []
        for order in "ab", "ba":
            result = call({key: torch.full((1,), float(ord(key))) for key in order})
            dist.all_reduce(result)
            found[name].append((result / size).tolist())
report(expected, observed)
