# With original parameters, FSDP1 cannot load a local state dict of its own: Unexpected key "_flat_param"
# https://github.com/pytorch/pytorch/issues/102667
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_local_state_original.py
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


expected, observed = {}, {}
for original in (False, True):
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=original)
    case = f"use_orig_params={original}"
    expected[case] = observed[case] = "loaded"
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        try:
            model.load_state_dict(model.state_dict())
        except RuntimeError as error:
            observed[case] = str(error)
report(expected, observed)
