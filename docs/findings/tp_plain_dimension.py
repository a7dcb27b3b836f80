# HSDP over tensor parallelism: a plain tensor in a sharded state dict is sharded over the replicas, not over the shards
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_plain_dimension.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("replicas", "shards", "tp"))
chunk = DTensorExtensions(None).chunk_dtensor(torch.ones(4, 2), 0, mesh["replicas", "shards"])
expected, observed = (Replicate(), Shard(0), Replicate()), tuple(chunk.placements)
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
