# linear and matmul of a batch whose later dimension is sharded over the earlier mesh dimension are silently wrong
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 dtensor_sequence_before_batch.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import linear

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 2))
x, w = torch.arange(32.0).view(2, 4, 2, 2), torch.tensor([[1.0, 0.0]])
sharded = distribute_tensor(x, mesh, [Shard(2), Shard(1)])
weight = distribute_tensor(w, mesh, [Replicate(), Replicate()])
expected = linear(x, w).flatten().tolist()
try:
    observed = linear(sharded, weight).full_tensor().flatten().tolist()
except RuntimeError as error:  # before 2.12, which refuses what it can't do
    expected = observed = f"refused: {error}"
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
