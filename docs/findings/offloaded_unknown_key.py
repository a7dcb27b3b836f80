# set_model_state_dict from rank 0 with strict=False and cpu_offload raises KeyError for a key that the model lacks
# https://github.com/pytorch/pytorch/issues/149516
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 offloaded_unknown_key.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


model = nn.Linear(4, 4, bias=False)
fully_shard(model)
state = {"weight": torch.ones(4, 4), "more": torch.ones(2)} if rank == 0 else {}
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False, cpu_offload=True)
set_model_state_dict(model, state, options=options)  # raises on rank 0, and torchrun ends with 1
report(16.0, float(model.weight.full_tensor().sum()))
