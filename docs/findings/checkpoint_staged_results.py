# BlockingAsyncStager does not stage results of DTensors that require gradients, and its copies of them require some
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_staged_results.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
plain = torch.nn.Parameter(torch.ones(2))
sharded = torch.nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))


def told(tensor: torch.Tensor) -> str:
    """Say whether the staged copy of a tensor requires gradients, or that there is none."""
    try:
        staged = BlockingAsyncStager().stage({"tensor": tensor})["tensor"]
    except RuntimeError as error:
        return str(error).split("(")[0].strip()
    return f"requires_grad={staged.requires_grad}"


expected = {"parameter": told(plain), "result": told(plain * 2)}
observed = {"parameter": told(sharded), "result": told(sharded * 2)}
print(f"rank {dist.get_rank()}: expected as of plain tensors: {expected}, observed of DTensors: {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
