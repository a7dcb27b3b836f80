# Under allow_mutation_on_saved_tensors, the forward of a module of fully_shard fails
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_saved_tensors_changed.py
# It exits with 1 where the defect is there. PyTorch takes out= for one tensor, which is a list of them here.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


model = nn.Linear(1, size, bias=False)
fully_shard(model)
try:
    with allow_mutation_on_saved_tensors():
        x = torch.full((1, 1), 1.0 + rank)
        y = model(x)
        x.zero_()
        y.sum().backward()
    observed: object = model.weight.grad.full_tensor().flatten().tolist()
except AttributeError as error:
    observed = f"AttributeError: {error}"
report([(size + 1) / 2] * size, observed)
