# real, imag and isfinite of a complex DTensor without dimensions, as of a sum or a dot product, raise an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_real_of_number.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
number = torch.tensor(1 + 2j)
expected, observed = {}, {}
for name in ("real", "imag", "isfinite", "view_as_real"):
    operation = getattr(torch, name)
    expected[name] = operation(number).tolist()
    try:
        observed[name] = operation(distribute_tensor(number, mesh, [Replicate()])).to_local().tolist()
    except RuntimeError as e:
        observed[name] = str(e).split("\n")[0]
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
