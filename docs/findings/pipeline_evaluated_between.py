# After an evaluation, the next step of a pipeline silently drops the gradients of earlier steps of FSDP2 stages
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 pipeline_evaluated_between.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("stages", "shards"))
data = torch.ones(4, 2)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the sum of products."""
    return (output * target).sum()


def gradient(calls: list[str], shard: bool) -> list:
    """Return the gradient after calls of a schedule."""
    layer = nn.Linear(2, 2, bias=False)
    nn.init.ones_(layer.weight)
    if shard:
        fully_shard(layer, mesh=mesh["shards"])
    group = mesh.get_group("stages")
    schedule = ScheduleGPipe(
        PipelineStage(layer, rank, size, torch.device("cpu"), group=group), 2, loss_fn=loss, scale_grads=False
    )
    for call in calls:
        with torch.set_grad_enabled(call == "step"):
            getattr(schedule, call)(*((data,) if rank == 0 else ()), target=data if rank == size - 1 else None)
    found = layer.weight.grad
    return (found.full_tensor() if shard else found).tolist()


calls = ["step", "eval", "step"]
expected, observed = gradient(calls, False), gradient(calls, True)
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
