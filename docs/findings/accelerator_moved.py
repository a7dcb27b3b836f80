# FSDP-replicate can't move a module to an accelerator of another package: tensor.data refuses its tensors
# unreported
# Seen on the sample accelerator (fixtures/vendors/sim; it has to be installed) with torch 2.13.0+cpu, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 accelerator_moved.py
# It exits with 1 where the defect is there.

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh

rank, device = int(os.environ["RANK"]), torch.accelerator.current_accelerator()
torch.accelerator.set_device_index(rank)
dist.init_process_group(dist.get_default_backend_for_device(device))
mesh = init_device_mesh(device.type, (2,))
try:
    model = replicate(nn.Linear(4, 2), mesh=mesh)  # of CUDA, it moves the parameters to the device
    observed = next(model.parameters()).device.type
except RuntimeError as e:
    observed = f"RuntimeError: {str(e).splitlines()[0]}"
print(f"rank {rank}: expected {device.type}, observed {observed}", flush=True)
os._exit(observed != device.type)
