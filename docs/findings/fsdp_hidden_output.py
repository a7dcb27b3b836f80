# Gradients of an output in an object, or kept by the module, are not averaged, without an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_hidden_output.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(y=self.layer(x))


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
model = Model()
replicate(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
model(torch.full((1, 1), 1.0 + rank)).y.sum().backward()
gradient = model.layer.weight.grad
observed = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).item()
print(f"rank {rank}: expected 1.5, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == 1.5 else 1)
