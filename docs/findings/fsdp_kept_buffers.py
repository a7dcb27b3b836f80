# FSDP1's state_dict(keep_vars=True) silently casts the module's own buffers back from buffer_dtype
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_kept_buffers.py
# It exits with 1 where the defect is there.

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

warnings.simplefilter("ignore")
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.scale.to(x.dtype))


mixed = MixedPrecision(buffer_dtype=torch.bfloat16)
model = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), mixed_precision=mixed)
observed = []
for keep_vars in None, False, True:
    if keep_vars is not None:
        model.state_dict(keep_vars=keep_vars)
    model(torch.ones(1, 2))
    observed.append(model.module.scale.dtype)
expected = [torch.bfloat16] * 3
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
