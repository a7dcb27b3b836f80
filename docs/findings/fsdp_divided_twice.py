# set_gradient_divide_factor of a replicated module divides twice where sums are forced, or in float16 and float64
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_divided_twice.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


# float32 and bfloat16 without forced sums are right; float16 and float64 are as wrong as this.
model = nn.Linear(2, 1, bias=False)
nn.init.ones_(model.weight)
replicate(model)
model.set_force_sum_reduction_for_comms(True)
model.set_gradient_divide_factor(4.0)
model(torch.ones(1, 2)).sum().backward()
report([size / 4.0] * 2, model.weight.grad.full_tensor().flatten().tolist())
