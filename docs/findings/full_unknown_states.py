# Of a full state dict, kinds of states that the optimizer does not have are loaded as whole plain tensors: steps fail
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 full_unknown_states.py
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
trained = torch.optim.AdamW(model.parameters(), lr=0.5, amsgrad=True)
model(torch.ones(2, 4)).sum().backward()
trained.step()
trained.zero_grad()
options = StateDictOptions(full_state_dict=True)
fresh = torch.optim.AdamW(model.parameters(), lr=0.5)  # amsgrad is loaded, too
set_optimizer_state_dict(model, fresh, get_optimizer_state_dict(model, trained, options=options), options=options)
model(torch.ones(2, 4)).sum().backward()
try:
    fresh.step()
    observed = "a step"
except RuntimeError as error:
    observed = f"RuntimeError: {error}"
print(f"rank {rank}: after loading: expected a step, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != "a step")
