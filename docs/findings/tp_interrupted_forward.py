# FSDP with NO_SHARD: after an exception in a forward, original parameters are no parameters of the model any more
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_interrupted_forward.py
# It exits with 1 where the defect is there.

import contextlib
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

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
    nn.Linear(2, 1),
    device_mesh=init_device_mesh("cpu", (size,)),
    device_id=torch.device("cpu"),
    sharding_strategy=ShardingStrategy.NO_SHARD,
    use_orig_params=True,
)
with contextlib.suppress(RuntimeError):
    model(torch.ones(1, 3))  # a batch of the wrong shape
model(torch.ones(1, 2)).sum().backward()
report(2, len(list(model.parameters())))
