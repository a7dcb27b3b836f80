# The backward of cumprod, cummax and cummin of a DTensor raises an error
# https://github.com/pytorch/pytorch/issues/185362
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_scan_gradients.py
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
functions = {
    "cumprod": lambda x: x.cumprod(0),
    "cummax": lambda x: x.cummax(0)[0],
    "cummin": lambda x: x.cummin(0)[0],
}
expected: dict[str, object] = {}
found: dict[str, object] = {}
for name, function in functions.items():
    plain = torch.arange(1.0, 5).requires_grad_()
    function(plain).sum().backward()
    expected[name] = plain.grad.tolist()
    x = distribute_tensor(plain.detach(), mesh, [Shard(0)]).requires_grad_()
    try:
        function(x).sum().backward()
        found[name] = x.grad.full_tensor().tolist()
    except RuntimeError as error:
        found[name] = repr(error)
report(expected, found)
