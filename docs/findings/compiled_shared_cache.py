# Inductor's cache, which the ranks of a machine share, gives a rank the code of another rank's part of a DTensor
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_shared_cache.py
# It exits with 1 on rank 1 where the defect is there: rank 1 computes the part of rank 0, silently.

import sys
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

# Where the cut of a local tensor begins depends on the rank. It is a constant in the code, and is not in the key.
dist.init_process_group("gloo", timeout=timedelta(seconds=200))
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))
tags = [uuid.uuid4().hex] if rank == 0 else [""]
dist.broadcast_object_list(tags)
given = DTensor.from_local(torch.tensor([10.0, 20.0]), mesh, [Replicate()])
function = torch.compile(lambda x: x.redistribute(placements=[Shard(0)]))
with torch.compiler.config.patch(cache_key_tag=tags[0]):  # nothing of former runs
    if rank == 1:
        dist.barrier()  # rank 0 compiles first
    observed = function(given).to_local().tolist()
    if rank == 0:
        dist.barrier()
expected = [[10.0], [20.0]][rank]
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(observed != expected)
