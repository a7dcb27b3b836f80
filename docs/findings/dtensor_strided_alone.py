# A tensor with a strided shard on a mesh of one dimension can be distributed, but not put together
# unreported
# Seen with torch 2.11.0+cu130, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_strided_alone.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
whole = torch.arange(4.0)
expected = observed = whole.tolist()
try:
    parts = distribute_tensor(whole, mesh, [_StridedShard(0, split_factor=2)], src_data_rank=None)
    observed = parts.full_tensor().tolist()
except (RuntimeError, ValueError) as e:
    observed = str(e).splitlines()[0]
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == expected else 1)
