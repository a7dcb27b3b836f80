# mark_unbacked of several dimensions at once silently ignores strict=True: code is compiled for one size of them
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_marked_dimensions.py
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


def outcome(*marks: object) -> str:
    """Compile code that works for four rows and four columns alone, with an input whose sizes are marked."""
    torch.compiler.reset()
    x = torch.ones(4, 4)
    for dims in marks:
        mark_unbacked(x, dims, strict=True)
    try:
        torch.compile(lambda t: t + torch.ones(4, 4), backend="eager", fullgraph=True)(x)
    except Exception as error:  # of an internal class
        return type(error).__name__
    return "compiled for these sizes"


report(
    {"one by one": "ConstraintViolationError"} | {"at once": "ConstraintViolationError"},
    {"one by one": outcome(0, 1)} | {"at once": outcome([0, 1])},
)
