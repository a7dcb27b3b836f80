# Zero-bubble pipeline schedules silently don't average gradients of stages in DDP, but for the first stage's
# https://github.com/pytorch/pytorch/issues/144530
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 pipeline_split_ddp.py
# It exits with 1 where the defect is there.

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "stages"))
replica, rank = mesh.get_local_rank("replicas"), mesh.get_local_rank("stages")


def layer() -> nn.Linear:
    """Return a layer that multiplies by two."""
    made = nn.Linear(1, 1, bias=False)
    nn.init.constant_(made.weight, 2.0)
    return made


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the sum of products."""
    return (output * target).sum()


batches = [torch.arange(4.0).view(4, 1) + 4 * r for r in range(2)]
data, mine = batches[replica], (rank, rank + 2)
layers = [layer() for _ in range(4)]
like = torch.zeros(1, 1)
stages = [
    PipelineStage(
        DistributedDataParallel(layers[i], process_group=mesh.get_group("replicas")),
        i,
        4,
        torch.device("cpu"),
        input_args=like.clone().requires_grad_(i > 0),
        output_args=like.clone().requires_grad_(),
        group=mesh.get_group("stages"),
    )
    for i in mine
]
schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=loss, scale_grads=False)
schedule.step(*((data,) if rank == 0 else ()), target=data if rank == 1 else None)
alone = nn.Sequential(*(layer() for _ in range(4)))
for batch in batches:
    (loss(alone(batch), batch) / 2).backward()
wrong = False
for i in mine:
    expected, observed = alone[i].weight.grad.item(), layers[i].weight.grad.item()
    wrong |= expected != observed
    print(f"replica {replica}, stage {i}: expected {expected}, observed {observed}", flush=True)
os._exit(wrong)
