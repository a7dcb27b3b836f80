# With mixed precision, FSDP loses the gradients after a forward that no backward followed
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_abandoned_forward.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

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
    nn.Linear(size, 1, bias=False),
    device_mesh=init_device_mesh("cpu", (size,)),
    device_id=torch.device("cpu"),
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
    use_orig_params=True,
)
model(torch.ones(1, size))  # its loss is not finite, say, so the training loop goes on to the next batch
model(torch.ones(1, size)).sum().backward()
gradient = next(model.parameters()).grad
report([1.0], None if gradient is None else gradient.flatten().tolist())
