# A pipeline silently gives microbatches of a batch in shards shapes that are not those of their parts: rows are lost
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 pipeline_sharded_batch.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))
data = torch.arange(6.0)
expected = data.tolist()
chunks = split_args_kwargs_into_chunks((distribute_tensor(data, mesh, [Shard(0)]),), {}, 4)[0]
observed = sorted(torch.cat([chunk.full_tensor() for (chunk,) in chunks]).tolist())
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
