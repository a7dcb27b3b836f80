# set_optimizer_state_dict of a full state silently loses empty settings and states, and changes dicts by number
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 full_state_settings.py
# It exits with 1 where the defect is there: keys of dicts become text, and tuples become lists, as Adam's betas do.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
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


settings = {"betas": (0.5, 0.25), "skipped": [], "rates": {1: 0.5, 10: 0.25}}
model = fully_shard(nn.Linear(4, 4))
optimizer = torch.optim.AdamW([{"params": list(model.parameters()), **settings}])
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
optimizer.state[model.weight]["history"] = []
full = StateDictOptions(full_state_dict=True)
set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer, options=full), options=full)
found = {name: optimizer.param_groups[0].get(name, "lost") for name in settings}
report((settings, []), (found, optimizer.state[model.weight].get("history", "lost")))
