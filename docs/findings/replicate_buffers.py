# replicate() takes broadcast_buffers=True, and leaves buffers different on ranks
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_buffers.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 1.0 + rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


# DistributedDataParallel(Model()) gives every rank the buffers of rank 0.
model = replicate(Model(), broadcast_buffers=True)
model(torch.ones(1, 4))
observed = model.scale[0].item()
print(f"rank {rank}: expected 1.0, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == 1.0 else 1)
