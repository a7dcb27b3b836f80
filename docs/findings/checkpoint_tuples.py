# A checkpoint silently has one rank's part of DTensors in a tuple, which every rank loads as its own
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_tuples.py
# It exits with 1 where the defect is there.

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
checkpoint.save({"ema": (distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]),)}, checkpoint_id=folder[0])
loaded = {"ema": (distribute_tensor(torch.zeros(4), mesh, [Shard(0)]),)}
checkpoint.load(loaded, checkpoint_id=folder[0])
observed, expected = loaded["ema"][0].full_tensor().tolist(), [0.0, 1.0, 2.0, 3.0]
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
