# HSDP silently adds a gradient that awaits its all-reduce to another parameter's if the next backward uses that one
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 fsdp_pending_to_another.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * getattr(self, name)


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
model = fully_shard(Two(), mesh=mesh)
model.set_requires_all_reduce(False)
model(torch.full((4,), 2.0), "a").sum().backward()
model.set_requires_all_reduce(True)
model(torch.full((4,), 10.0), "b").sum().backward()
observed = {n: None if p.grad is None else p.grad.full_tensor().tolist() for n, p in model.named_parameters()}
expected = {"a": [2.0] * 4, "b": [10.0] * 4}
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
