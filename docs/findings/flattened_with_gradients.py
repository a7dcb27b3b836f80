# While a parameter has a gradient, setting a flattened state of a fresh optimizer silently loads no states
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 flattened_with_gradients.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
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


WAYS = {
    "as it is": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "whole": StateDictOptions(full_state_dict=True),
}
model = fully_shard(nn.Linear(2, 2))
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2)).sum().backward()
optimizer.step()
observed = {}
for name, options in WAYS.items():
    state = get_optimizer_state_dict(model, optimizer, options=options)
    fresh = torch.optim.Adam(model.parameters())
    try:  # the gradients of the step are there
        set_optimizer_state_dict(model, fresh, state, options=options)
    except AssertionError as error:
        observed[name] = repr(error)
    else:
        observed[name] = f"states: {sorted(fresh.state[model.weight])}"
report(dict.fromkeys(WAYS, "states: ['exp_avg', 'exp_avg_sq', 'step']"), observed)
