# ZeroRedundancyOptimizer silently trains nothing if groups have their parameters as a generator, as model.parameters()
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 zero_groups_of_generators.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group("gloo")
body, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
for parameter in (*body.parameters(), *head.parameters()):
    torch.nn.init.ones_(parameter)
groups = [{"params": body.parameters()}, {"params": head.parameters(), "lr": 0.25}]
optimizer = ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=0.5)
head(body(torch.ones(1, 2))).sum().backward()
optimizer.step()
observed = [len(group["params"]) for group in optimizer.param_groups], body.weight[0, 0].item(), head.bias[0].item()
expected = [2, 2], 0.0, 0.75
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
