# Gradients of tensor-parallel replicas are summed in the parameter's dtype, whatever reduce_dtype is
# https://github.com/pytorch/pytorch/issues/190626
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_tensor_parallel_dtype.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
model = parallelize_module(nn.Sequential(nn.LayerNorm(4)), mesh["tp"], {"0": SequenceParallel()})
fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
output = model(torch.ones(1, 2 * size, 4)).to_local()
output.backward(torch.full_like(output, 0.5 if rank else 128.0))  # the bias gets 512 on rank 0 and 2 on each other
report(512.0 + 2.0 * (size - 1), float(model[0].bias.grad.full_tensor()[0]))
