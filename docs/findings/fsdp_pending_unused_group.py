# HSDP silently adds a gradient that awaits its all-reduce a step too late if the next backward does not use its group
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_pending_unused_group.py
# It exits with 1 where the defect is there. The same happens under FSDP-replicate.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return getattr(self, name)(x)


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
model = Either()
for module in (model.a, model.b, model):
    fully_shard(module, mesh=mesh)


def backward(name: str) -> None:
    model(torch.ones(1, 2), name).sum().backward()


model.set_requires_all_reduce(False)
backward("a")
model.set_requires_all_reduce(True)
backward("b")
observed = []
for _ in range(2):
    observed.append({n: p.grad.full_tensor().mean().item() for n, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    backward("a")
expected = [{"a.weight": 1.0, "b.weight": 1.0}, {"a.weight": 1.0}]
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
