# A rank's compiled code computes with the old size of a DTensor if only another rank's shard has another size now
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_uneven_size.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
compiled = torch.compile(lambda x: x / x.size(0), backend="eager")
for rows in (7, 6):  # of which the second rank has three
    result = compiled(distribute_tensor(torch.full((rows, 1), float(rows)), mesh, [Shard(0)]))
observed = result.to_local().flatten().tolist()
expected = [1.0] * 3  # each row divided by their number
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
wrong = torch.tensor(float(observed != expected))
dist.all_reduce(wrong)
dist.destroy_process_group()
sys.exit(wrong.item() > 0)
