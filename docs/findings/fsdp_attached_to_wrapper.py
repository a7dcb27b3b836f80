# The state dict of an FSDP1 module to which a module was assigned can't be loaded: missing keys
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_attached_to_wrapper.py
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


model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
model.head = nn.Linear(4, 2)
with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
    try:
        model.load_state_dict(model.state_dict())
        found = "loaded"
    except RuntimeError as error:
        found = str(error)
report("loaded", found)
