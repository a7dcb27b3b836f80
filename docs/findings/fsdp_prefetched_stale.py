# A forward silently computes with parameters that were prefetched in an earlier forward, and have changed since
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_prefetched_stale.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
        for parameter in self.parameters():
            torch.nn.init.ones_(parameter)

    def forward(self, x, both):
        x = self.first(x)
        return self.second(x) if both else x


mesh = init_device_mesh("cpu", (2,))
model = Model()
for layer in (model.first, model.second, model):
    fully_shard(layer, mesh=mesh)
model.first.set_modules_to_forward_prefetch([model.second])
with torch.no_grad():
    model(torch.ones(1, 1), False)  # prefetches the second layer, but does not use it
    model.reshard()
    for parameter in model.parameters():
        parameter.fill_(2.0)
    observed, expected = model(torch.ones(1, 1), True).item(), 4.0
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
