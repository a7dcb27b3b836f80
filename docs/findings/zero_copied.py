# A step of a copied or pickled ZeroRedundancyOptimizer raises AttributeError: copies lack what its constructor sets
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 zero_copied.py
# It exits with 1 where the defect is there.

import copy
import sys

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group("gloo")

model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(model.weight)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)
try:
    copied, copied_optimizer = copy.deepcopy((model, optimizer))
    copied(torch.ones(1, 1)).sum().backward()
    copied_optimizer.step()
    observed = str((model.weight.item(), copied.weight.item()))
except AttributeError as error:
    observed = repr(error)
expected = "(1.0, 0.5)"
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
