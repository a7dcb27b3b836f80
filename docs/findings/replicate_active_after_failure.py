# After a forward of composable replicate that raised an error, graphs of all compiled code end at buckets
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 replicate_active_after_failure.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate

dist.init_process_group("gloo", timeout=timedelta(seconds=20))


class Fails(nn.Module):
    """A layer that can't take some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("skip this batch")
        return self.layer(x)


def graphs(model: nn.Module) -> int:
    """Compile a model that is under nothing, and count its graphs."""
    torch.compiler.reset()
    found = []
    torch.compile(model, backend=lambda graph, _: found.append(graph) or graph)(torch.ones(2, 512))
    return len(found)


other = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
before = graphs(other)
model = replicate(Fails(), bucket_cap_mb=1)
model(torch.ones(2, 512)).sum().backward()
try:
    model(torch.full((2, 512), torch.nan))
except ValueError:
    pass
after = graphs(other)
print(f"expected {before}, observed {after}", flush=True)
dist.destroy_process_group()
sys.exit(before != after)
