# get_optimizer_state_dict before the first step leaves weight decay in the states, as in SGD's momentum, silently
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 state_dict_decays_a_step.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()


def weight(read: bool) -> float:
    """Return a weight after one step of SGD."""
    model = nn.Linear(2, 2, bias=False)
    nn.init.ones_(model.weight)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5, weight_decay=0.5)
    if read:
        get_optimizer_state_dict(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model.weight.full_tensor()[0, 0].item()


expected, observed = weight(False), weight(True)
print(f"rank {rank}: weight after a step: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
