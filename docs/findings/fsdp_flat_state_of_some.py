# FSDP1 silently loses the loaded states of a flat parameter if the first of its parameters has none
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_flat_state_of_some.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
state = {
    "state": {"bias": {"momentum_buffer": torch.ones(2)}},  # of a model whose weight was not trained yet
    "param_groups": [optimizer.state_dict()["param_groups"][0] | {"params": ["weight", "bias"]}],
}
loaded = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
optimizer.load_state_dict(loaded)
found = torch.zeros(())
for parameter in model.parameters():
    if parameter in optimizer.state:
        found += optimizer.state[parameter]["momentum_buffer"].sum()
dist.all_reduce(found)
report(2.0, found.item())
