# A checkpointed layer with an output_dtype is recomputed in another dtype than in the forward, which raises
# unreported
# Seen with torch 2.11.0+cu130, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_checkpointed_dtype.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            x = checkpoint(layer, x, use_reentrant=False)
        return x


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
model = Model()
for module in (model.first, model.second, model):
    replicate(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
expected = observed = "gradients"
try:
    model(torch.ones(1, 1, requires_grad=True)).sum().backward()
except RuntimeError as e:
    observed = str(e).splitlines()[0]
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == expected else 1)
