# clip_grad_value_ fails on a rank that has no gradients, as a rank may have none of its own with FSDP
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 clip_value_no_gradients.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


model = FullyShardedDataParallel(
    nn.Linear(1, 1, bias=False),  # one number, so only rank 0 has a shard of it
    device_mesh=init_device_mesh("cpu", (size,)),
    device_id=torch.device("cpu"),
    use_orig_params=True,
)
model(torch.ones(1, 1)).sum().backward()
try:
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    outcome = "clipped"
except RuntimeError as error:
    outcome = str(error).split(",")[0]
report("clipped", outcome)
