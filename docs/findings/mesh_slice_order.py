# A mesh can't be sliced to dimensions in another order than its own, as its docstring does: KeyError
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 mesh_slice_order.py
# It exits with 1 where the defect is there.

import sys

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
mesh_3d = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "pp", "cp"))
try:
    observed = mesh_3d["cp", "dp"].mesh.tolist()  # which the docstring of DeviceMesh.__getitem__ says is transposed
except KeyError as e:
    observed = f"KeyError: {e}"
expected = [[0, 2], [1, 3]]
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
