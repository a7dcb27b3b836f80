# index_put by a mask of several dimensions raises IndexError for a DTensor that is sharded along the second of them
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_masked_put.py
# It exits with 1 where the defect is there.
#
# As each other index, the mask is taken for one of a single dimension, so that the tensor stays sharded along the
# next one, and the mask is not. With rows sharded it works. Before 2.14, x[mask] = 9 of such an x raises the same.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
whole = torch.arange(16.0).reshape(4, 4)
nine = torch.tensor(9.0)
expected = dict.fromkeys(["rows", "columns"], whole.index_put((whole < 5,), nine).sum().item())
observed: dict[str, object] = {}
for name, dim in ("rows", 0), ("columns", 1):
    x = distribute_tensor(whole, mesh, [Shard(dim)])
    try:
        observed[name] = x.index_put((x < 5,), nine).full_tensor().sum().item()
    except IndexError as error:
        observed[name] = f"IndexError: {error}"
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
