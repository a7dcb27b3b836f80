# BlockingAsyncStager silently does not copy DTensors without dimensions: a checkpoint gets their later values
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_staged_scalars.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
state = {
    name: distribute_tensor(value, mesh, [Replicate()])
    for name, value in (("scalar", torch.tensor(1.0)), ("vector", torch.ones(1)))
}
staged = BlockingAsyncStager().stage(state)
for tensor in state.values():
    tensor.add_(4)
observed = {name: tensor.to_local().sum().item() for name, tensor in staged.items()}
expected = {"scalar": 1.0, "vector": 1.0}
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
