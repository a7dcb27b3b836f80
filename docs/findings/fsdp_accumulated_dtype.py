# with a reduce_dtype, a layer that an unsynchronized backward left out breaks the next backward
# https://github.com/pytorch/pytorch/issues/196996
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_accumulated_dtype.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.always(x)
        return self.sometimes(x) if both else x


model = replicate(Model().double(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
model.set_requires_gradient_sync(False)
model(torch.ones(1, 2, dtype=torch.float64), False).sum().backward()
model.set_requires_gradient_sync(True)
model(torch.ones(1, 2, dtype=torch.float64), True).sum().backward()  # raises, and torchrun ends with 1
report(torch.float64, model.always.weight.grad.dtype)
