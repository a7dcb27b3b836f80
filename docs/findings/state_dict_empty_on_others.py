# set_state_dict with broadcast_from_rank0 loads no model on other ranks if they have what get_state_dict gave: nothing
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 state_dict_empty_on_others.py
# It exits with 1 where the defect is there. Rank 0 broadcasts to ranks that do not take part.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=10))
rank = dist.get_rank()
model = nn.Linear(2, 2, bias=False)
nn.init.constant_(model.weight, 2.0)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
model_state, optimizer_state = get_state_dict(
    model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
)
with torch.no_grad():
    model.weight.to_local().fill_(0.0)
set_state_dict(
    model,
    optimizer,
    model_state_dict=model_state,
    optim_state_dict=optimizer_state,
    options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
)
observed = model.weight.to_local().tolist()
print(f"rank {rank}: expected [[2.0, 2.0]], observed {observed}", flush=True)
sys.exit(observed != [[2.0, 2.0]])
