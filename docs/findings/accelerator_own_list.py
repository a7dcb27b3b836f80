# fully_shard passes a plain list to a forward that is called with a list of a class of its own, on an accelerator
# unreported
# Seen on the sample accelerator (fixtures/vendors/sim; it has to be installed) with torch 2.13.0+cpu, Linux x86-64,
# and on an NVIDIA H100 with torch 2.11.0+cu130.
# Run:  torchrun --standalone --nproc-per-node=2 accelerator_own_list.py
# It exits with 1 where the defect is there.

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Tensors(list):
    pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, given: list) -> str:
        return type(given).__name__


rank, device = int(os.environ["RANK"]), torch.accelerator.current_accelerator()
torch.accelerator.set_device_index(rank)
dist.init_process_group(dist.get_default_backend_for_device(device))
model = fully_shard(Model().to(device), mesh=init_device_mesh(device.type, (2,)))
observed = model(Tensors([torch.ones(2, device=device)]))  # which is there already
print(f"rank {rank}: expected Tensors, observed {observed}", flush=True)
os._exit(observed != "Tensors")
