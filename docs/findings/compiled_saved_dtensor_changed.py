# A DTensor that compiled code has saved may be changed in place: the backward silently takes the changed one
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_saved_dtensor_changed.py
# It exits with 1 where the defect is there.

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
mesh = init_device_mesh("cpu", (2,))
observed = []
for function in torch.mul, torch.compile(lambda x, y: x * y, backend="aot_eager"):
    x, factor = (DTensor.from_local(torch.ones(2), mesh, [Shard(0)]) for _ in range(2))
    result = function(x.requires_grad_(), factor)
    factor.mul_(5)
    try:
        result.to_local().sum().backward()
        observed.append(f"the gradient {x.grad.to_local().tolist()}")
    except RuntimeError:
        observed.append("an error")
print(f"rank {dist.get_rank()}: expected an error twice, observed {observed}", flush=True)
os._exit(observed != ["an error"] * 2)
