# Pipeline schedules silently divide the gradient of a weight that two stages of a rank share once for each stage
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 pipeline_tied_stages.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
data, target = torch.arange(8.0).view(8, 1), torch.ones(8, 1)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean of products."""
    return (output * target).mean()


# Each rank has two of the four stages, with one weight (as the first and the last stage may have in a V).
layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
for layer in layers:
    nn.init.ones_(layer.weight)
layers[1].weight = layers[0].weight
stages = [PipelineStage(layer, rank + 2 * number, 4, torch.device("cpu")) for number, layer in enumerate(layers)]
schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=loss)
schedule.step(*((data,) if rank == 0 else ()), target=target if rank == 1 else None, losses=[])
expected, observed = 2 * data.mean().item(), layers[0].weight.grad.item()
print(f"rank {rank}: expected a gradient of {expected}, observed {observed}", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(observed != expected)
