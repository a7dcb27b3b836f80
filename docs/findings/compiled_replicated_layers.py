# torch.compile of a model whose torch.nn layers are replicated one by one compiles nothing, and does not say so
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_replicated_layers.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
graphs = 0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
    global graphs
    graphs += 1
    return graph.forward


model = Model()
replicate(model.first)
replicate(model.second)
torch.compile(model, backend=counting)(torch.ones(1, 4)).sum().backward()
print(f"rank {rank}: expected at least one graph, observed {graphs}", flush=True)
dist.destroy_process_group()
sys.exit(0 if graphs else 1)
