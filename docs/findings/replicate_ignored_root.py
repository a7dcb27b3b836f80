# A parameter of the root module that DDP is told to ignore is averaged all the same
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_ignored_root.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.full((1,), value))
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.own * x


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

model = Model(1.0 + rank)
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own"])  # as in named_parameters()
wrapped = DistributedDataParallel(model)
wrapped(torch.full((1, 1), 1.0 + rank)).sum().backward()
expected, observed = [1.0 + rank, 1.0 + rank], [model.own.item(), model.own.grad.item()]
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == expected else 1)
