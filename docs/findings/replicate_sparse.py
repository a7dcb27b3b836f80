# replicate() fails where a gradient is sparse, which DistributedDataParallel averages
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_sparse.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()


def gradient(wrap) -> list[float]:
    layer = nn.Embedding(3, 1, sparse=True)
    model = wrap(layer)
    model(torch.tensor([rank])).sum().backward()
    return layer.weight.grad.to_dense().flatten().tolist()


# replicate() hands DDP a list of parameters, so DDP does not see that a layer is nn.Embedding(sparse=True).
expected = gradient(DistributedDataParallel)
try:
    observed = gradient(replicate)
except NotImplementedError as e:
    observed = f"NotImplementedError: {e}"
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == expected else 1)
