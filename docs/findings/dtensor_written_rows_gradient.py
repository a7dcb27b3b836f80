# The backward of index_put, slice_scatter and select_scatter into a DTensor raises an error
# https://github.com/pytorch/pytorch/issues/118461
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_written_rows_gradient.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

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
rows, at = (
    distribute_tensor(torch.ones(2, 2), mesh, [Shard(1)]),
    distribute_tensor(torch.tensor([1, 3]), mesh, [Replicate()]),
)
operators = {
    "index_put": lambda x: torch.index_put(x, (at,), rows),
    "slice_scatter": lambda x: x.slice_scatter(rows, 0, 1, 4, 2),
}
found: dict[str, object] = {}
for name, operator in operators.items():
    x = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(1)]).requires_grad_()
    try:
        operator(x).sum().backward()
        found[name] = x.grad.full_tensor()[:, 0].tolist()
    except RuntimeError as error:
        found[name] = repr(error)
report({key: [1.0, 0.0, 1.0, 0.0] for key in operators}, found)
