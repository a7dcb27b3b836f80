# Code whose input has a dimension that mark_unbacked(specialize_on=...) marked raises KeyError when it is called
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_unbacked_specialized.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch._dynamo.decorators import mark_unbacked

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


x = torch.ones(8, 2)
mark_unbacked(x, 0, specialize_on=[lambda rows: rows == 8])
try:
    observed: object = torch.compile(lambda t: t.sum() * 2, backend="eager", fullgraph=True)(x).item()
except KeyError as error:
    observed = f"KeyError: {error}"
report(32.0, observed)
