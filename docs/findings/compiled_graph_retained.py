# Gradients of compiled DDP are silently wrong if a graph is retained and the caches have its backward from before
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_graph_retained.py
# It exits with 1 where the defect is there. The cache of graphs does not ask whether buffers were donated.

import os
import sys
import tempfile
from datetime import timedelta

os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=120))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


class Model(nn.Module):
    """Three layers, each of which fills a bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(512, 512) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.a(x) * x
        k = self.b(h).sin().exp().tanh() * h
        return h, self.c(k).tanh().sin()


def gradients(compiles: bool, retain: bool) -> list[torch.Tensor]:
    """Return the gradients of one step, with a backward for both outputs or one for each."""
    torch.compiler.reset()
    model = DistributedDataParallel(Model(), bucket_cap_mb=1, find_unused_parameters=True)
    function = torch.compile(model) if compiles else model
    first, second = function(torch.randn(8, 512, generator=torch.Generator().manual_seed(rank)))
    if retain:
        first.sum().backward(retain_graph=True)
    second.sum().backward()
    return [parameter.grad for parameter in model.parameters()]


right = gradients(False, True)
gradients(True, False)  # puts the backward into the caches
found = gradients(True, True)
close = all(torch.allclose(r, f, atol=1e-4) for r, f in zip(right, found, strict=True))
report("right gradients", "right gradients" if close else "wrong gradients")
