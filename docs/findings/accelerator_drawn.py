# torch.compile of a random operation on a DTensor raises an error on an accelerator other than CUDA
# unreported
# Seen on the sample accelerator (fixtures/vendors/sim; it has to be installed) with torch 2.13.0+cpu, Linux x86-64,
# and on an NVIDIA H100 with torch 2.11.0+cu130, whose error 2.12 mended for CUDA alone.
# Run:  torchrun --standalone --nproc-per-node=2 accelerator_drawn.py
# It exits with 1 where the defect is there.

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

rank, device = int(os.environ["RANK"]), torch.accelerator.current_accelerator()
torch.accelerator.set_device_index(rank)
dist.init_process_group(dist.get_default_backend_for_device(device))
x = distribute_tensor(torch.ones(4, device=device), init_device_mesh(device.type, (2,)), [Shard(0)])


def drawn(call) -> object:
    torch.manual_seed(7)
    try:
        return call(x).to_local().tolist()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


expected = drawn(torch.rand_like)
observed = drawn(torch.compile(lambda x: torch.rand_like(x), backend="eager", fullgraph=True))
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
os._exit(observed != expected)
