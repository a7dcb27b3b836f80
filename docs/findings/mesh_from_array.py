# DeviceMesh.from_group refuses the right ranks of one group as a tuple or an array, although it documents an ArrayLike
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 mesh_from_array.py
# It exits with 1 where the defect is there. Of several groups, it takes the same.

import sys

import numpy
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

dist.init_process_group("gloo")
observed = {}
for name, ranks in {"list": [0, 1], "tuple": (0, 1), "array": numpy.arange(2)}.items():
    try:
        observed[name] = DeviceMesh.from_group(dist.group.WORLD, "cpu", ranks).mesh.tolist()
    except ValueError as e:
        observed[name] = f"ValueError: {e}"
expected = {name: [0, 1] for name in ("list", "tuple", "array")}
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
