# get_optimizer_state_dict and get_state_dict silently ignore submodules for the states of optimizers
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 optimizer_state_of_submodules.py
# It exits with 1 where the defect is there. The parameter is deprecated, but documented.

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

warnings.simplefilter("ignore")  # submodules are deprecated
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
optimizer = torch.optim.Adam(model.parameters())
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
expected = sorted(get_model_state_dict(model, submodules={model["a"]}))
report(expected, sorted(get_optimizer_state_dict(model, optimizer, submodules={model["a"]})["state"]))
