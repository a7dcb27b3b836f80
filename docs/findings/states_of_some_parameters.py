# An optimizer state dict can't be loaded if it was saved while only some trainable parameters had a state
# https://github.com/pytorch/pytorch/issues/192202
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 states_of_some_parameters.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


model = nn.Linear(2, 2)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
model.weight.grad = torch.ones_like(model.weight)
optimizer.step()
optimizer.zero_grad()
fresh = torch.optim.AdamW(model.parameters())
try:
    set_optimizer_state_dict(model, fresh, get_optimizer_state_dict(model, optimizer))
    report("loaded", "loaded")
except RuntimeError as error:
    report("loaded", f"RuntimeError: {str(error).splitlines()[0]}")
