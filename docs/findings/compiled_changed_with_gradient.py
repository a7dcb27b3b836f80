# Compiled code that changes a DTensor in place that it is given and that requires a gradient raises an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_changed_with_gradient.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def change(d: DTensor) -> DTensor:
    d.mul_(3)
    return d * 2


mesh = init_device_mesh("cpu", (size,))
gradients = []
for function in change, torch.compile(change, backend="aot_eager"):
    local = torch.ones(2, requires_grad=True)
    try:
        function(DTensor.from_local(local, mesh, [Shard(0)]) * 1).to_local().sum().backward()
        gradients.append(str(local.grad))
    except RuntimeError as error:
        gradients.append(type(error).__name__ + ": " + str(error).splitlines()[-1])
report(*gradients)
