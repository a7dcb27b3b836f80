# In join(), ranks without a batch take no part in a buffer hook after the forward: a process aborts or hangs
# https://github.com/pytorch/pytorch/issues/65436
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_join_buffer_hook.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum()
        return self.layer(x)


def average(_: None, buffers: dict[str, torch.Tensor]) -> None:
    for buffer in buffers.values():
        dist.all_reduce(buffer)
        buffer /= 2


dist.init_process_group("gloo", timeout=timedelta(seconds=10))
rank = dist.get_rank()

model = DistributedDataParallel(Model())
model._register_buffer_comm_hook(None, average)  # after the forward, which is the default
gradients = []
try:
    with model.join():
        for _ in range(1 + rank):
            model.zero_grad()
            model(torch.full((1, 1), 1.0 + rank)).sum().backward()
            gradients.append(model.module.layer.weight.grad.item())
    observed: object = (gradients, model.module.seen.item())
except RuntimeError as e:
    observed = f"RuntimeError: {e}".splitlines()[0]
expected = ([1.5, 1.0][: 1 + rank], 2.5)
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == expected else 1)
