# Dual numbers (torch.autograd.forward_ad) raise in nested groups of fully_shard, and for inputs that require gradients
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_dual_numbers.py
# It exits with 1 where the defect is there. torch.func.jvp works since 2.13.

import sys
from datetime import timedelta

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))

observed = {}
for name in ("nested", "input"):
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in model:
        nn.init.constant_(layer.weight, 3.0)
        if name == "nested":
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.full((1, 1), 2.0, requires_grad=name == "input")
    try:
        with forward_ad.dual_level():
            output = model(forward_ad.make_dual(x, torch.ones_like(x)))
            observed[name] = forward_ad.unpack_dual(output).tangent.item()
    except RuntimeError as error:
        observed[name] = str(error).splitlines()[0]
expected = {"nested": 9.0, "input": 9.0}
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == expected else 1)
