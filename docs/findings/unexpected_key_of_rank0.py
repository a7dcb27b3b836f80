# If rank 0 broadcasts a state with a key that the model lacks, set_model_state_dict raises on rank 0 alone
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 unexpected_key_of_rank0.py
# It exits with 1 where the defect is there: the other ranks go on, and wait for rank 0 in their next collective.

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


state = {"weight": torch.ones(2, 2), "bias": torch.ones(2), "more": torch.ones(2)} if rank == 0 else {}
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
observed = "no error"
try:
    set_model_state_dict(fully_shard(nn.Linear(2, 2)), state, options=options)
except RuntimeError as error:
    observed = f"an error that names {'more' if 'more' in str(error) else 'nothing'}"
report("an error that names more", observed)
