# After a backward that failed, FSDP2's reset_iter_state keeps gradients, which the next step adds
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_reset_gradients.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.first.weight)
        nn.init.ones_(self.second.weight)
        self.fails = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.fails:
            x.register_hook(lambda gradient: 1 / 0)
        return self.second(x)


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

model = fully_shard(Model(), mesh=init_device_mesh("cpu", (2,)))
if not hasattr(model, "reset_iter_state"):
    sys.exit(0)  # PyTorch has it since 2.13
x = torch.full((1, 1), 1.0 + rank)
try:
    model(x).sum().backward()
except ZeroDivisionError:
    model.reset_iter_state()
model.zero_grad()
model.fails = False
model(x).sum().backward()
observed = [p.grad.full_tensor().item() for p in model.parameters()]
print(f"rank {rank}: expected [1.5, 1.5], observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == [1.5, 1.5] else 1)
