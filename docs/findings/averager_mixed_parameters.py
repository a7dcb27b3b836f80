# A model averager silently averages different parameters with each other, where ranks have gradients of different ones
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 averager_mixed_parameters.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

dist.init_process_group("gloo")
rank = dist.get_rank()
# a layer that all use, and two experts, of which each rank has used one
names = ("shared", "first", "second")
parameters = [torch.nn.Parameter(torch.tensor([value])) for value in (1.0, 10.0, 100.0)]
for used in (0, 1 + rank):
    parameters[used].grad = torch.zeros(1)
PeriodicModelAverager(period=1).average_parameters(parameters)
expected = dict(zip(names, (1.0, 10.0, 100.0), strict=True))  # they are equal on all ranks, and so is their average
observed = {name: p.item() for name, p in zip(names, parameters, strict=True)}
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
