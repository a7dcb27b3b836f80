# After a call of a pipeline schedule whose loss raised, the next step silently takes gradients of that call's losses
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 pipeline_failed_losses.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean of products, which has to be finite."""
    result = (output * target).mean()
    if not result.isfinite():
        raise ValueError(f"a loss of {result.item()}")
    return result


layer = nn.Linear(1, 1, bias=False)
nn.init.ones_(layer.weight)
schedule = ScheduleGPipe(PipelineStage(layer, rank, size, torch.device("cpu")), 2, loss_fn=loss)
data, bad = torch.arange(4.0).view(4, 1), torch.tensor([[1.0], [1.0], [1.0], [float("inf")]])


def call(how: str, x: torch.Tensor) -> None:
    """Train with or evaluate a batch."""
    target = torch.ones(4, 1) if rank == size - 1 else None
    getattr(schedule, how)(*((x,) if rank == 0 else ()), target=target)


call("step", data)
try:
    call("eval", bad)  # the last rank skips a bad batch, of which it has the loss of a first microbatch
except ValueError as error:
    print(f"rank {rank}: {error}", flush=True)
layer.zero_grad()
call("step", data)
expected, observed = data.mean().item(), layer.weight.grad.item()
print(f"rank {rank}: expected a gradient of {expected}, observed {observed}", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(observed != expected)
