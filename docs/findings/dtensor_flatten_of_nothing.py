# flatten of a DTensor without rows, such as an empty batch, never ends
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_flatten_of_nothing.py
# It exits with 1 where the defect is there.

import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

dist.init_process_group("gloo")
rank = dist.get_rank()
batch = distribute_tensor(torch.ones(0, 4), init_device_mesh("cpu", (2,)), [Replicate()])


def ring(*_: object) -> None:
    """End what does not end."""
    print(f"rank {rank}: expected (0,), observed nothing for 5 seconds", flush=True)
    sys.exit(1)


signal.signal(signal.SIGALRM, ring)
signal.alarm(5)
shape = tuple(batch.flatten().shape)
signal.alarm(0)
print(f"rank {rank}: expected (0,), observed {shape}", flush=True)
dist.destroy_process_group()
sys.exit(shape != (0,))
