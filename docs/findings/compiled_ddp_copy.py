# A deep copy of a DDP module that compiles itself silently computes with the original's parameters, and trains those
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_ddp_copy.py
# It exits with 1 where the defect is there.

import copy
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")

model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
model.compile(backend="eager")
copied = copy.deepcopy(model)
for each, value in ((model, 1.0), (copied, 2.0)):
    torch.nn.init.constant_(each.module.weight, value)
output = copied(torch.ones(1, 1))
output.sum().backward()
observed = (output.item(), model.module.weight.grad is not None, copied.module.weight.grad is not None)
expected = (2.0, False, True)  # the copy's result, and which of the two has a gradient
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
