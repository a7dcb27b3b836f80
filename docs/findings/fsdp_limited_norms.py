# Under fully_shard, what an embedding with max_norm writes into its weight in the forward is silently lost
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_limited_norms.py
# It exits with 1 where the defect is there.

import copy
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
plain = nn.Embedding(4, 1, max_norm=1.0)
with torch.no_grad():
    plain.weight.copy_(torch.arange(4.0).view(4, 1))
model = fully_shard(copy.deepcopy(plain), mesh=mesh)
tokens = torch.arange(4)  # the same on each rank
plain(tokens).sum().backward()
model(tokens).sum().backward()
expected = plain.weight.flatten().tolist()
observed = model.weight.full_tensor().flatten().tolist()
close = torch.allclose(torch.tensor(expected), torch.tensor(observed), atol=1e-4)
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(not close)
