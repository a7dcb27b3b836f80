# torch.compile of DDP fails in AOTAutograd where a block of several buckets is compiled for any number
# https://github.com/pytorch/pytorch/issues/196227
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 compiled_numbers.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
WIDE = 512  # a layer of 1 MiB, DDP's first bucket


class Block(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number
        self.first, self.second = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = 1 - self.number
        return x + self.second(self.first(x) / keep) * keep


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number) for number in (0.1, 0.2, 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


model = torch.compile(DistributedDataParallel(Model(), bucket_cap_mb=1), backend="aot_eager")
try:
    observed = str(list(model(torch.ones(2, WIDE)).shape))
except Exception as error:
    observed = type(error).__name__ + ": " + str(error).splitlines()[1]
print(f"rank 0: expected {[2, WIDE]}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != str([2, WIDE]))
