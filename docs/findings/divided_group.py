# If parameters of one saved group are in several ones, set_optimizer_state_dict loses the settings of all but the last
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 divided_group.py
# It exits with 1 where the defect is there: the other groups have no lr any more. Optimizer.load_state_dict raises
# ValueError for another number of groups, and a flattened state dict gives each group its settings.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
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


model = fully_shard(nn.Linear(2, 2))
saved = torch.optim.Adam(model.parameters(), lr=0.5)
divided = torch.optim.Adam([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.25)
try:
    set_optimizer_state_dict(model, divided, get_optimizer_state_dict(model, saved))
except ValueError:  # as Optimizer.load_state_dict raises, which would be right as well
    report("an error", "an error")
report([0.5, 0.5], [group.get("lr", "no lr") for group in divided.param_groups])
