# after an error in the forward of a module with input_reshard, it silently goes on with what all modules save
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 input_reshard_after_error.py
# It exits with 1 where the defect is there.

import sys
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel.input_reshard import input_reshard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

layer = input_reshard(nn.Linear(2, 2), init_device_mesh("cpu", (2,)), 0)
with suppress(RuntimeError):  # about the sizes of the matrices
    layer(torch.ones(2, 3))
# A computation of each rank alone, which has nothing to do with the layer. If only one rank makes it, it hangs.
x = torch.full((4,), 1.0 + rank, requires_grad=True)
(x * x).sum().backward()
expected, observed = [2.0 + 2 * rank] * 4, x.grad.tolist()
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
bad = torch.tensor([float(observed != expected)])
dist.all_reduce(bad)
dist.destroy_process_group()
sys.exit(bool(bad))
