# Compiled code refuses a DTensor whose size is within the bounds of mark_dynamic, if a rank's part of it is not.
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_dtensor_bounds.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def outcome(rows: int) -> str:
    """Compile code for a DTensor of eight or more rows, of which each rank has a part."""
    torch.compiler.reset()
    x = distribute_tensor(torch.ones(rows, 3), init_device_mesh("cpu", (size,)), [Shard(0)])
    torch._dynamo.mark_dynamic(x, 0, min=8, max=64)
    try:
        torch.compile(lambda t: t * 2, backend="eager", fullgraph=True)(x)
    except Exception as error:  # of an internal class
        return type(error).__name__
    return "compiled"


report({16: "compiled", 8: "compiled"}, {rows: outcome(rows) for rows in (16, 8)})
