# set_model_state_dict with full_state_dict says that all keys matched if one is missing, although it is strict
# https://github.com/pytorch/pytorch/issues/126285
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 full_state_without_a_key.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


try:
    options = StateDictOptions(full_state_dict=True, strict=True)
    report("an error", str(set_model_state_dict(nn.Linear(2, 2), {"weight": torch.ones(2, 2)}, options=options)))
except RuntimeError:
    report("an error", "an error")
