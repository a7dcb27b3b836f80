# In a CommDebugMode, backward collectives of a module are also counted for the module inside that it called after them
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 debug_mode_backward_of_child.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

dist.init_process_group("gloo", timeout=timedelta(seconds=20))


class Summed(torch.autograd.Function):
    """Sum over the ranks, and so the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Sum a copy."""
        result = x.clone()
        dist.all_reduce(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Sum a copy."""
        result = gradients[0].clone()
        dist.all_reduce(result)
        return result


class Layer(nn.Module):
    """A layer that sums, and gives the sum to the one inside, which doesn't communicate."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum, and call the layer inside."""
        result: torch.Tensor = self.child(Summed.apply(x))
        return result


with CommDebugMode() as mode:
    Layer()(torch.ones(2, requires_grad=True)).sum().backward()
expected = {"Global": 1, "Layer": 1}
observed = {name: sum(each["backward"].values()) for name, each in mode.comm_module_counts.items()}
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
