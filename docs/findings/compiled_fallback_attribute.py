# Compiled code silently keeps an attribute that __getattr__ gave once the object has one of its own
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_fallback_attribute.py
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


class Settings:
    """Settings that are two if they are not set."""

    def __getattr__(self, name: str) -> int:
        return 2


def step(x: torch.Tensor, settings: Settings) -> torch.Tensor:
    return x * settings.scale


expected, observed = [], []
for found, call in (expected, step), (observed, torch.compile(step, backend="eager")):
    settings = Settings()
    for scale in None, 6, 7:
        if scale:
            settings.scale = scale  # type: ignore[misc]
        result = call(torch.ones(1), settings)
        dist.all_reduce(result)
        found.append((result / size).item())
report(expected, observed)
