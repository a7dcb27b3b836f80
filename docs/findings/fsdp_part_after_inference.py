# A module under fully_shard whose first forward ran in inference mode silently never gets a gradient
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_part_after_inference.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

encoder, head = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
for layer in encoder, head:
    nn.init.ones_(layer.weight)
    fully_shard(layer)
with torch.inference_mode():
    encoder(torch.ones(1, 2))  # as an evaluation of the encoder alone, or a cache of its outputs
head(encoder(torch.ones(1, 2))).sum().backward()
found = {"encoder": encoder.weight.grad, "head": head.weight.grad}
expected = {"encoder": [[1.0, 1.0], [1.0, 1.0]], "head": [[2.0, 2.0]]}
observed = {name: None if grad is None else grad.full_tensor().tolist() for name, grad in found.items()}
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
