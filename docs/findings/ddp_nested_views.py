# Gradients of a module under DDP within another one are silently wrong if one of them has gradient_as_bucket_view
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 ddp_nested_views.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.p**2 * self.q * x


observed = []
for inner, outer in ((False, False), (False, True), (True, False)):
    module = DistributedDataParallel(Product(), gradient_as_bucket_view=inner)
    model = DistributedDataParallel(module, gradient_as_bucket_view=outer)
    steps = []
    for _ in range(3):
        try:
            model(torch.tensor(1.0 + rank)).backward()
        except RuntimeError as error:
            print(f"rank {rank}: averages or an error are expected, observed {error}", flush=True)
            break
        steps.append([parameter.grad.item() for parameter in model.parameters()])
        model.zero_grad()
    observed.append(steps)
report([[[18.0, 6.0]] * len(steps) for steps in observed], observed)
