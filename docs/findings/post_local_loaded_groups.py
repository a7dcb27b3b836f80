# After load_state_dict, param_groups of a PostLocalSGDOptimizer silently have no effect; added ones are not averaged
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 post_local_loaded_groups.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

dist.init_process_group("gloo")
first, added = (torch.nn.Parameter(torch.full((1,), float(dist.get_rank()))) for _ in range(2))
optimizer = PostLocalSGDOptimizer(torch.optim.SGD([first], lr=1.0), PeriodicModelAverager(2))
optimizer.load_state_dict(optimizer.state_dict())
torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=9)  # halves the rate
optimizer.add_param_group({"params": [added]})
for parameter in (first, added):
    parameter.grad = torch.ones(1)
optimizer.step()  # averages
observed, expected = [first.item(), added.item()], [0.0, -0.5]
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
