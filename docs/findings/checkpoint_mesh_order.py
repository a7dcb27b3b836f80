# A checkpoint of a DTensor on a mesh whose ranks are not in ascending order is silently permuted, or lacks rows
# https://github.com/pytorch/pytorch/pull/193224
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_mesh_order.py
# It exits with 1 where the defect is there.

import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
mesh = DeviceMesh("cpu", [1, 0])
whole = torch.arange(1.0, 6.0)
tensor = distribute_tensor(whole, mesh, [Shard(0)])
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder, src=0)
checkpoint.save({"x": tensor}, checkpoint_id=folder[0])
loaded = {"x": torch.zeros(5)}
checkpoint.load(loaded, checkpoint_id=folder[0])
expected, observed = whole.tolist(), loaded["x"].tolist()
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
