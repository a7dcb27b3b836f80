# share_memory_ and from_dlpack take the memory of a DTensor, which has none: a segmentation fault
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_memory_taken.py
# It exits with 1 where the defect is there.

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))


def share_module(x: DTensor) -> object:
    """Share the parameters of a layer whose weight is a DTensor."""
    layer = nn.Linear(2, 2 * size, bias=False)
    layer.weight = nn.Parameter(x)
    return layer.share_memory()


ways: dict[str, Callable[[DTensor], object]] = {
    "numpy": lambda x: x.numpy(),
    "share_memory_": lambda x: x.share_memory_(),
    "Module.share_memory": share_module,
    "torch.from_dlpack": lambda x: torch.from_dlpack(x) + 0,
}
expected = dict.fromkeys(ways, "works or raises an error")
observed = {}
for name, way in ways.items():
    whole = torch.arange(4.0 * size).view(2 * size, 2)
    tensor = distribute_tensor(whole, mesh, [Shard(0)])
    child = os.fork()  # since a crash would end the script
    if not child:
        try:
            way(tensor)
        except (RuntimeError, TypeError, BufferError):
            pass
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    observed[name] = expected[name] if ended == 0 else f"crashes by signal {-ended}"
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
