# FSDP1's sharded state dict of a channels-last weight raises ValueError, unless FSDP1 was given a mesh
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_sharded_layouts.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


layer = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
model = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
    try:
        observed = str(sorted(model.state_dict()))
    except ValueError as e:
        observed = f"ValueError: {e}"
report(str(["bias", "weight"]), observed)
