# context_parallel raises RuntimeError if the dimension of a buffer's sequence is counted from the end
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 context_parallel_from_the_end.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))
expected, observed = {}, {}
for dim in 1, -1:
    tokens = torch.arange(16.0).view(2, 8)
    expected[dim] = (2, 8 // size)
    try:
        with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[dim]):
            observed[dim] = tuple(tokens.shape)
    except RuntimeError as error:
        observed[dim] = f"RuntimeError: {error}"
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
