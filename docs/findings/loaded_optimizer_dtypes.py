# Loading silently casts states of an optimizer to the dtype of their parameter: NAdam loses digits of its products
# https://github.com/pytorch/pytorch/issues/43706
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 loaded_optimizer_dtypes.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
model = fully_shard(torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16))
trained, optimizer = (torch.optim.NAdam(model.parameters(), lr=0.5) for _ in range(2))
model.weight.grad = torch.ones_like(model.weight)
trained.step()
model.weight.grad = None
set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, trained))
expected, observed = (each.state[model.weight]["mu_product"] for each in (trained, optimizer))
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed.dtype != expected.dtype)
