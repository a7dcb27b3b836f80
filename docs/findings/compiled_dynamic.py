# torch.compile with dynamic=True of FSDP1 over a tensor-parallel layer is an endless recursion in AOTAutograd
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_dynamic.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

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
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp"))
model = parallelize_module(Model(), mesh["tp"], {"layer": ColwiseParallel(output_layouts=Replicate())})
model = FullyShardedDataParallel(model, device_mesh=mesh["dp"], device_id=torch.device("cpu"), use_orig_params=True)
output = torch.compile(model, backend="aot_eager", dynamic=True)(torch.ones(2, 4))  # raises, and torchrun ends with 1
report([2, 4], list(output.shape))
