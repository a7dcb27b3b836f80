# After compiled DDP of several buckets whose forward ends with a no_grad block, gradients stay disabled in the thread
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 compiled_ddp_mode_stays.py
# It exits with 1 where the defect is there.

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")


class Model(nn.Module):
    """Three layers that also tell about the weights of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.eye(512) for _ in range(3))  # 1 MiB each, a bucket for each

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Multiply, and return a norm besides."""
        for weight in self.weights:
            x = x @ weight
        with torch.no_grad():
            norm = self.weights[-1].norm()
        return x, norm


compiled = torch.compile(DistributedDataParallel(Model(), bucket_cap_mb=1), backend="eager")
compiled(torch.ones(1, 512))
after = nn.Linear(1, 1)(torch.ones(1)).requires_grad
print(f"after the call, a layer's result requires a gradient: expected True, observed {after}", flush=True)
os._exit(not after)
