# SequenceParallel makes frozen parameters trainable
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_sequence_frozen.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()

norm = nn.LayerNorm(4).requires_grad_(False)
parallelize_module(norm, init_device_mesh("cpu", (size,)), SequenceParallel())
expected, observed = [False, False], [parameter.requires_grad for parameter in norm.parameters()]
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == expected else 1)
