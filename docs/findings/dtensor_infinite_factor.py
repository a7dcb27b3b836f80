# A pending sum times infinity, or divided by zero, is silently nan where its parts differ in sign
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_infinite_factor.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, init_device_mesh

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))
part = torch.tensor([[4.0, -2.0], [2.0, 4.0]])[rank]  # of the sum [6.0, 2.0]
pending = DTensor.from_local(part, mesh, [Partial()])
observed = [(pending * float("inf")).full_tensor().tolist(), (pending / 0.0).full_tensor().tolist()]
expected = [[float("inf")] * 2] * 2
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
