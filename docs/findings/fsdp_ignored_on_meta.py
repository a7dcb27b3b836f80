# FSDP1 shards a parameter in ignored_states if the model is on the meta device
# https://github.com/pytorch/pytorch/issues/117924
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_ignored_on_meta.py
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


with torch.device("meta"):
    model = nn.Linear(2, 2)
model = FullyShardedDataParallel(
    model, ignored_states=[model.weight], use_orig_params=True, device_id=torch.device("cpu")
)
report((2, 2), tuple(model.weight.shape))
