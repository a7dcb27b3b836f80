# After an evaluation under FSDP2, states of optimizers can be neither got nor set, and whole model states not set
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 state_dict_after_evaluation.py
# It exits with 1 where the defect is there. The evaluation leaves the root's parameters unsharded, as it is to do.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
full = StateDictOptions(full_state_dict=True)

model = fully_shard(nn.Linear(2, 2, bias=False))
adam = torch.optim.Adam(model.parameters(), lr=0.5)
model(torch.ones(1, 2)).sum().backward()
adam.step()
adam.zero_grad()
saved, states = get_state_dict(model, adam, options=full)
calls = {
    "get_optimizer_state_dict": lambda: get_optimizer_state_dict(model, adam, options=full),
    "set_optimizer_state_dict": lambda: set_optimizer_state_dict(model, adam, states, options=full),
    "set_model_state_dict": lambda: set_model_state_dict(model, saved, options=full),
}
failed = {}
for name, call in calls.items():
    with torch.no_grad():
        model(torch.ones(1, 2))
    try:
        call()
    except (KeyError, RuntimeError) as e:
        failed[name] = type(e).__name__
print(f"rank {rank}: expected no error, observed {failed}", flush=True)
dist.destroy_process_group()
sys.exit(1 if failed else 0)
