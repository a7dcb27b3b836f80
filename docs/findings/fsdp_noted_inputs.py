# What a layer under fully_shard puts into a list or dict that it is given is silently lost if that has gradients in it
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_noted_inputs.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()


class Layer(torch.nn.Module):
    """A layer that notes a loss of its own, as layers of experts do."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x, losses):
        y = self.linear(x)
        losses.append(y.square().mean())
        return y


layers = torch.nn.ModuleList(Layer() for _ in range(3))
for layer in layers:
    fully_shard(layer)
losses = []
x = torch.ones(2)
for layer in layers:
    x = layer(x, losses)
print(f"rank {rank}: expected 3 losses, observed {len(losses)}", flush=True)
dist.destroy_process_group()
sys.exit(len(losses) != 3)
