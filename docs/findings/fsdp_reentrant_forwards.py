# If a backward follows two forwards, FSDP2 misses gradients of a reentrant checkpoint and leaves it unsharded
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_reentrant_forwards.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=True) * 1


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))

model = Model()
fully_shard(model.inner, mesh=mesh)
fully_shard(model, mesh=mesh)
weight = model.inner.weight  # as optimizers hold it
x = torch.full((4,), 1.0 + rank, requires_grad=True)
(model(x).sum() + model(2 * x).sum()).backward()  # ranks have 1 + 2 and 2 + 4
expected, observed = [4.5, "DTensor"], [weight.grad.full_tensor()[0].item(), type(model.inner.weight.data).__name__]
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == expected else 1)
