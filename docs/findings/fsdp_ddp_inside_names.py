# the optimizer's state of FSDP1 around a DDP module has other names than the model's state, and can't be loaded
# https://github.com/pytorch/pytorch/pull/96415
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_ddp_inside_names.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


inner = DistributedDataParallel(nn.Linear(2, 2, bias=False))
model = FullyShardedDataParallel(
    nn.Sequential(nn.Linear(2, 2, bias=False), inner),
    ignored_modules=[inner],
    use_orig_params=True,
    device_id=torch.device("cpu"),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
model(torch.tensor([[1.0, 2.0]])).sum().backward()
optimizer.step()
of_model, of_optimizer = get_state_dict(model, optimizer)
report(sorted(of_model), sorted(of_optimizer["state"]))
