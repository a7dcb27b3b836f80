# FSDP1 silently casts a buffer of an ignored module to buffer_dtype if the policy wraps a module around that one
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_policy_ignored_buffers.py
# It exits with 1 where the defect is there. Without a policy, pytorch/pytorch#77439 was mended.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


class Part(nn.Module):
    """A weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.tensor([1.0, 257.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() * x


class Layer(nn.Module):
    """A layer with such a part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.part = nn.Linear(1, 1), Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.layer(x))


model = nn.Sequential(Layer())
ignored = model[0].part
model = FullyShardedDataParallel(
    model,
    auto_wrap_policy=ModuleWrapPolicy({Layer}),
    ignored_modules=[ignored],
    mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16),
    device_id=torch.device("cpu"),
)
model(torch.ones(1)).sum().backward()
report((torch.float32, [1.0, 257.0]), (ignored.kept.dtype, ignored.kept.tolist()))
