# Each forward without a backward makes FSDP2 hold more memory: it records the order of groups for a backward
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_evaluations_recorded.py
# It exits with 1 where the defect is there. The next backward frees it, which a process that evaluates never does.

import sys
import tracemalloc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
held = []
tracemalloc.start()
with torch.no_grad():
    for _ in range(3):
        for _ in range(300):
            model(torch.ones(1, 2))
        held.append(tracemalloc.get_traced_memory()[0])
observed = (held[2] - held[1]) // 300
print(f"rank {dist.get_rank()}: expected less than 8 bytes for each forward, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed >= 8)
