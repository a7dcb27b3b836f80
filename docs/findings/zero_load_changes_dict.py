# ZeroRedundancyOptimizer.load_state_dict silently empties the caller's dict of the states that other ranks have
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 zero_load_changes_dict.py
# It exits with 1 where the defect is there.

import copy
import sys

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.consolidate_state_dict(to=0)
shared = [copy.deepcopy(optimizer.state_dict()) if dist.get_rank() == 0 else None]
dist.broadcast_object_list(shared, src=0)
state = shared[0]
expected = {number: sorted(each) for number, each in state["state"].items()}
optimizer.load_state_dict(state)
observed = {number: sorted(each or ()) for number, each in state["state"].items()}
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
