# a model averager silently makes channels-last and transposed weights contiguous: DDP then mixes up their gradients
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 averager_strides.py
# It exits with 1 where the defect is there.

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

warnings.simplefilter("ignore")
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

convolution = nn.Conv2d(2, 1, 2, bias=False).to(memory_format=torch.channels_last)
model = DistributedDataParallel(convolution, find_unused_parameters=True)
image = torch.arange(8.0).view(1, 2, 2, 2)  # each weight's gradient is the pixel that it is multiplied by
before, observed = convolution.weight.stride(), []
for _ in range(2):
    model.zero_grad()
    model(image).sum().backward()
    observed.append(convolution.weight.grad.flatten().tolist())
    PeriodicModelAverager(period=1).average_parameters(model.parameters())
expected = [image.flatten().tolist()] * 2
print(f"rank {rank}: strides were {before}, are {convolution.weight.stride()}")
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected or convolution.weight.stride() != before)
