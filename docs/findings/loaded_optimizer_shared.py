# An optimizer shares its state with the dict that it loaded: steps silently change a checkpoint in memory
# https://github.com/pytorch/pytorch/issues/196083
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 loaded_optimizer_shared.py
# It exits with 1 where the defect is there. A module's load_state_dict copies.

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = fully_shard(nn.Linear(2, 2, bias=False))
optimizer = torch.optim.Adam(model.parameters(), lr=0.5)


def step() -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


step()
weights, state = copy.deepcopy(get_state_dict(model, optimizer))
observed = []
for _ in range(2):  # goes back to the first step twice
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    step()
    observed.append(optimizer.state[model.weight]["step"].item())
expected = [2.0, 2.0]
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
