# Gradients of an output in a dataclass are not averaged, without an error
# unreported
# Seen with torch 2.11.0+cu130, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_dataclass_output.py
# It exits with 1 where the defect is there.

import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate


@dataclass
class Output:
    y: torch.Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(self.layer(x))


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
model = replicate(Model())
model(torch.full((1, 1), 1.0 + rank)).y.sum().backward()
gradient = model.layer.weight.grad
observed = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).item()
expected = 1.5
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == expected else 1)
