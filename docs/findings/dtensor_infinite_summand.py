# A pending minimum less infinity, or a maximum plus infinity, is silently nan where one rank's part is infinite.
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_infinite_summand.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))
part = torch.tensor([[float("inf"), 4.0], [4.0, 4.0]])[rank]  # of the minimum [4.0, 4.0]
pending = DTensor.from_local(part, mesh, [Partial("min")])
less = distribute_tensor(torch.full((2,), -float("inf")), mesh, [Replicate()])
observed, expected = (pending + less).full_tensor().tolist(), [-float("inf")] * 2
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
