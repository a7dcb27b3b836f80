# Under mixed precision of fully_shard, what a layer puts into a list or dict that it is given is silently lost
# https://github.com/huggingface/transformers/issues/45663
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_cast_containers.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()


class Layer(torch.nn.Module):
    """A layer that leaves a result for later layers, as the keys and values of attention."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x, shared):
        y = self.linear(x)
        shared[len(shared)] = y.detach()
        return y


layers = torch.nn.ModuleList(Layer() for _ in range(3))
for layer in layers:
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
shared = {}
x = torch.ones(2)
with torch.no_grad():
    for layer in layers:
        x = layer(x, shared)
print(f"rank {rank}: expected the results of layers [0, 1, 2], observed {list(shared)}", flush=True)
dist.destroy_process_group()
sys.exit(list(shared) != [0, 1, 2])
