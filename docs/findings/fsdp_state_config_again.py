# FSDP1 changes the ShardedStateDictConfig that it is given: used with a mesh, it fails for a model without one
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_state_config_again.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


settings = ShardedStateDictConfig()
mesh = init_device_mesh("cpu", (size,))
found = []
for where in ({"device_mesh": mesh}, {}):
    model = FullyShardedDataParallel(nn.Linear(2, 2, bias=False), device_id=torch.device("cpu"), **where)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, settings):
        try:
            found.append(type(model.state_dict()["weight"]).__name__)
        except AttributeError as error:
            found.append(str(error))
report(["DTensor", "ShardedTensor"], found)
