# Of a flattened state dict, an optimizer silently loads only the kinds of states that it has, but all settings
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 flattened_unknown_states.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
model = fully_shard(nn.Linear(4, 4, bias=False))
trained = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
model(torch.ones(2, 4)).sum().backward()
trained.step()
trained.zero_grad()
observed = {}
for flat in False, True:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    fresh = torch.optim.SGD(model.parameters(), lr=0.5)  # its momentum is loaded, too
    set_optimizer_state_dict(model, fresh, get_optimizer_state_dict(model, trained, options=options), options=options)
    observed[flat] = (fresh.param_groups[0]["momentum"], list(fresh.state[model.weight]))
print(f"rank {rank}: momentum and states: expected {observed[False]}, observed {observed[True]}", flush=True)
dist.destroy_process_group()
sys.exit(observed[True] != observed[False])
