# FSDP1's optim_state_dict raises KeyError: 0 if an optimizer has a state of one's own before those of parameters
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_own_state_first.py
# It exits with 1 where the defect is there. A state that is set after the first step is copied.

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

warnings.simplefilter("ignore")  # of state_dict_type, which is deprecated, and of the state, which FSDP copies
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


model = FullyShardedDataParallel(nn.Linear(3, 2), use_orig_params=True, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
optimizer.state["own"] = {"count": 3}
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
try:
    found = sorted(FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"])
except KeyError as error:
    found = f"KeyError: {error}"
report(["bias", "own", "weight"], found)
