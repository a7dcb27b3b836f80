# Compiled code that returns a DTensor and a view of it, or of its argument, raises an error
# https://github.com/pytorch/pytorch/issues/184002
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_returned_views.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (size,))
functions = {"own": lambda x: ((y := x + 1), y[:, :1]), "argument's": lambda x: (x + 1, x[:, :1])}
found: dict[str, object] = {}
for name, function in functions.items():
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).requires_grad_(name == "own")
    try:
        found[name] = [tuple(y.shape) for y in torch.compile(function, backend="aot_eager")(x)]
    except RuntimeError as error:
        found[name] = repr(error)
report({key: [(4, 4), (4, 1)] for key in functions}, found)
