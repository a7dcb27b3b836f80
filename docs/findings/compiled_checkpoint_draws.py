# With backend="eager", gradients of compiled code are silently wrong if a checkpoint in it draws random numbers
# https://github.com/pytorch/pytorch/issues/160773
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_checkpoint_draws.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


class Dropping(torch.nn.Module):
    """Multiplies its input with a weight, and drops half of the products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: torch.nn.functional.dropout(y * self.weight, 0.5), x, use_reentrant=False)


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


module = DistributedDataParallel(Dropping())
torch.manual_seed(7)
y = torch.compile(module, backend="eager")(torch.ones(8))
y.sum().backward()
# by default, a checkpoint draws the same numbers again: the gradient is what the forward multiplied the weight with
report(y.tolist(), module.module.weight.grad.tolist())
