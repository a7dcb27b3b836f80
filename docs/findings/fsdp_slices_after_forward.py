# with an integer reshard_after_forward, fully_shard over a slice of a mesh hangs or fails: it makes each slice's groups
# unreported
# Ranks of several slices, as beside tensor parallelism, make groups of other members under the same names.
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=8 fsdp_slices_after_forward.py
# It exits with 1 where the defect is there.

import os
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("tensor", "data"))
expected = 1.0 + sum(range(rank // 4 * 4, rank // 4 * 4 + 4)) / 4


def hung() -> None:
    """End where nothing goes on."""
    print(f"rank {rank}: expected a gradient of {expected}, observed that it hangs", flush=True)
    os._exit(1)


timer = threading.Timer(15.0, hung)
timer.daemon = True
timer.start()
try:
    for _ in range(3):
        model = nn.Linear(1, 8, bias=False)
        fully_shard(model, mesh=mesh["data"], reshard_after_forward=2)
        model(torch.full((1, 1), 1.0 + rank)).sum().backward()
        observed: object = model.weight.grad.full_tensor()[0, 0].item()
except Exception as error:
    observed = f"{type(error).__name__}: {error}".splitlines()[0]
print(f"rank {rank}: expected a gradient of {expected}, observed {observed}", flush=True)
if observed != expected:
    os._exit(1)
dist.barrier()
timer.cancel()
dist.destroy_process_group()
sys.exit(0)
