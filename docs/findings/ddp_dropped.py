# If nothing refers to the DDP module any more, its backward silently leaves each rank its own gradients, or fails
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 ddp_dropped.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
observed = {}
for name, options in {
    "default": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}.items():
    module = nn.Linear(2, 1, bias=False)
    output = DistributedDataParallel(module, **options)(torch.full((1, 2), 1.0 + rank))
    try:
        output.sum().backward()
        observed[name] = module.weight.grad.tolist()
    except AttributeError as error:
        observed[name] = str(error)
expected = {name: [[1.5, 1.5]] for name in ("default", "unused", "static")}
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
