# In compiled code, a part of a DTensor whose strides alone are dynamic cannot be used: TypeError
# https://github.com/pytorch/pytorch/issues/152954
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_symbolic_strides.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

dist.init_process_group("gloo")
rank = dist.get_rank()


def first_columns(x: DTensor) -> DTensor:
    """Double two columns."""
    return x[:, :2] * 2


x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
torch._dynamo.mark_dynamic(x, 1)
expected = first_columns(x).full_tensor().sum().item()
try:
    observed: object = torch.compile(first_columns, backend="eager", fullgraph=True)(x).full_tensor().sum().item()
except Exception as error:
    observed = f"{type(error).__name__}: {str(error).splitlines()[1].strip()[:250]}"
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
