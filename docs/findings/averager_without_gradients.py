# a model averager raises ValueError if no parameter has a gradient, although it is to leave these out
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 averager_without_gradients.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

dist.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.tensor([float(dist.get_rank())]))
expected = parameter.tolist()
try:
    PeriodicModelAverager(period=1).average_parameters([parameter])
    observed = str(parameter.tolist())
except ValueError as error:
    observed = f"ValueError: {error}"
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != str(expected))
