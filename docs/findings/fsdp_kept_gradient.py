# Under FSDP1, a gradient that a script keeps is silently overwritten in the next forward, if others keep theirs
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_kept_gradient.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()


class Weights(torch.nn.Module):
    """Four weights, of which each rank has two."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.ones(4) for _ in range(4))

    def forward(self, x):
        return torch.stack([weight.sum() for weight in self.weights]).sum() * x


model = FullyShardedDataParallel(Weights(), use_orig_params=True, device_id=torch.device("cpu"))
model(torch.ones(1)).sum().backward()
parameter = [*model.parameters()][2 * rank]
kept, parameter.grad = parameter.grad, None
expected = kept.tolist()
model(torch.ones(1))
observed = kept.tolist()
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
