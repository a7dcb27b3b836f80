# A flattened optimizer state dict that lacks a parameter's state is taken, and empty dicts are loaded in its place
# https://github.com/pytorch/pytorch/issues/192224
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 flattened_missing_state.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
options = StateDictOptions(flatten_optimizer_state_dict=True, strict=True)
model = fully_shard(nn.Linear(4, 4))
optimizer, fresh = (torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5) for _ in range(2))
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
optimizer.zero_grad()
saved = get_optimizer_state_dict(model, optimizer, options=options)
del saved["state.bias.momentum_buffer"]
try:
    set_optimizer_state_dict(model, fresh, saved, options=options)
    observed = f"loaded as {fresh.state[model.bias]}"
except RuntimeError as error:
    observed = f"refused: {error}"
print(f"rank {rank}: a state dict without one state: expected refused, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(not observed.startswith("refused"))
