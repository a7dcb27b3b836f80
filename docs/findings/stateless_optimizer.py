# The whole state of an optimizer that has none, SGD without momentum, can be got and not be set
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 stateless_optimizer.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
model = replicate(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
options = StateDictOptions(full_state_dict=True)
saved, state = get_state_dict(model, optimizer, options=options)
try:
    set_state_dict(model, optimizer, model_state_dict=saved, optim_state_dict=state, options=options)
    observed = "set"
except AssertionError as e:
    observed = f"AssertionError: {e}"
print(f"rank {rank}: expected set, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == "set" else 1)
