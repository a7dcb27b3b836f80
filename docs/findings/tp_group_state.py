# optim_state_dict of FSDP1 raises for flat parameters on a group that lacks the world's rank 0
# https://github.com/pytorch/pytorch/issues/155680
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=3 tp_group_state.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
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


group = [dist.new_group([0]), dist.new_group([1, 2])][min(rank, 1)]
options = {"process_group": group, "device_id": torch.device("cpu"), "use_orig_params": False}
model = FullyShardedDataParallel(nn.Linear(2, 2), **options)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
try:
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizer, group=group)
    observed = sorted(saved["state"])
except ValueError as error:
    observed = [str(error)]
report(["bias", "weight"], observed)
