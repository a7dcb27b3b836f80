# on the host, a full state dict that is offloaded crashes or raises
# https://github.com/pytorch/pytorch/issues/188989
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_first_rank_state.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True)
config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
    state = model.state_dict()  # crashes on rank 0, and torchrun ends with 1
report(["weight", "bias"] if rank == 0 else [], list(state))
