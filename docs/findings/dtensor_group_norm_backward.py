# The backward of group_norm of DTensors raises unless everything is replicated and has a weight and a bias
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_group_norm_backward.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
observed = {}
for placement in (Shard(0), Replicate()):
    for given in ((), ("weight",), ("bias",), ("weight", "bias")):
        x = distribute_tensor(torch.arange(24.0).reshape(2, 4, 3), mesh, [placement]).requires_grad_()
        parameters = {name: distribute_tensor(torch.ones(4), mesh, [Replicate()]).requires_grad_() for name in given}
        found = torch.nn.functional.group_norm(x, 2, **parameters)
        try:
            found.square().sum().backward()
        except (RuntimeError, NotImplementedError) as e:
            observed[f"{placement} with {' and '.join(given) or 'neither'}"] = f"{type(e).__name__}: {str(e)[:60]}"
print(f"rank {dist.get_rank()}: expected no error, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(bool(observed))
