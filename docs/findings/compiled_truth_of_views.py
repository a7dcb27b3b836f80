# In compiled code, the items() of an empty dict, or its mapping proxy, are silently true
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_truth_of_views.py
# It exits with 1 where the defect is there.

import sys
from collections.abc import Callable
from datetime import timedelta
from types import MappingProxyType

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


steps: dict[str, Callable[..., torch.Tensor]] = {
    "items": lambda x, table: x * 2 if table.items() else x * 3,
    "proxy": lambda x, table: x * 2 if table else x * 3,
}
expected, observed = {}, {}
for name, step in steps.items():
    torch.compiler.reset()
    for found, call in (expected, step), (observed, torch.compile(step, backend="eager")):
        found[name] = []
        for content in {}, {"a": 1}, {}:
            result = call(torch.ones(1), MappingProxyType(content) if name == "proxy" else content)
            dist.all_reduce(result)
            found[name].append((result / size).item())
report(expected, observed)
