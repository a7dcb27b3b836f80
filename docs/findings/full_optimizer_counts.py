# A full optimizer state of a sharded model is silently of two steps: moments are copies, but the counts of steps go on
# unreported; https://github.com/pytorch/pytorch/issues/196083 is about an optimizer's own state dict
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 full_optimizer_counts.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = fully_shard(nn.Linear(2, 4, bias=False))
optimizer = torch.optim.Adam(model.parameters(), lr=0.5)


def step() -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def numbers(state: dict) -> dict:
    return {name: value.flatten()[0].item() for name, value in state["state"]["weight"].items()}


step()
state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
expected = numbers(state)
step()
observed = numbers(state)
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
