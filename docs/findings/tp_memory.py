# FSDP: the memory of a flat parameter is never freed
# https://github.com/pytorch/pytorch/pull/183211
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_memory.py
# It exits with 1 where the defect is there.
#
# A layer's weight is a view of the flat parameter, so its grad_fn holds the flat parameter (in C++, where the garbage
# collector can't see it); the flat parameter names the layer in _param_infos.

import gc
import sys
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4)), device_id=torch.device("cpu"))
model(torch.ones(1, 4)).sum().backward()
flat = weakref.ref(next(model.parameters()))
del model
gc.collect()
observed = "freed" if flat() is None else "still there"
print(f"rank {rank}: expected freed, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == "freed" else 1)
