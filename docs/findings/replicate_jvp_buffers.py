# torch.func.jvp of a module under DDP fails if the module has a buffer
# https://github.com/pytorch/pytorch/issues/130932
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_jvp_buffers.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.register_buffer("level", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.level


model = DistributedDataParallel(Model())
x = torch.full((1, 1), 1.0 + rank)
observed = []
try:
    output, derivative = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    (output + 3 * derivative).sum().backward()  # ranks have gradients 1 + 3 and 2 + 3
    observed.append(model.module.layer.weight.grad.item())
except RuntimeError as e:
    observed.append(f"RuntimeError: {e}".splitlines()[0])
print(f"rank {rank}: expected [4.5], observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == [4.5] else 1)
