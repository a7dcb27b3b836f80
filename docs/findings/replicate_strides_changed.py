# If parameters' strides change after DDP was made, as to channels last, their gradients are silently mixed up
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_strides_changed.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


observed = []
for way in "to", "ZeroRedundancyOptimizer":
    layer = nn.Conv2d(2, 1, (1, 2), bias=False)
    if way == "to":
        model = DistributedDataParallel(layer)  # with find_unused_parameters, every step is wrong
        layer.to(memory_format=torch.channels_last)
    else:
        model = DistributedDataParallel(layer.to(memory_format=torch.channels_last))
        ZeroRedundancyOptimizer(layer.parameters(), torch.optim.SGD, lr=0.1, parameters_as_bucket_view=True)
    # The gradient of a weight of one output is the input.
    model(torch.tensor([[[[1.0, 2.0]], [[3.0, 4.0]]]])).sum().backward()
    observed.append(layer.weight.grad.flatten().tolist())
report([[1.0, 2.0, 3.0, 4.0]] * 2, observed)
