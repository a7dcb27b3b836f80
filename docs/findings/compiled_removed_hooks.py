# torch.compile of a hook of a DTensor or of a collective's result that is removed again is an AssertionError
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_removed_hooks.py
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


def function(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda gradient: gradient * 100).remove()
    return (y * 3).sum()


outcomes: list[object] = []
for call in function, torch.compile(function, backend="aot_eager"):
    x = distribute_tensor(torch.ones(size, 1), init_device_mesh("cpu", (size,)), [Shard(0)]).requires_grad_()
    try:
        call(x).backward()
        outcomes.append(x.grad.full_tensor().tolist())
    except Exception as error:
        outcomes.append(f"{type(error).__name__}: {error}".splitlines()[0])
report(*outcomes)
