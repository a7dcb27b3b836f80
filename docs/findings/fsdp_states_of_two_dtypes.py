# With original parameters, FSDP1 raises AssertionError for an optimizer whose states of a parameter have two dtypes
# https://github.com/pytorch/pytorch/issues/156166
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_states_of_two_dtypes.py
# It exits with 1 where the defect is there. With use_orig_params=False, the state dict has both dtypes.

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


model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.SGD(model.parameters())
model(torch.ones(1, 2)).sum().backward()
for parameter in model.parameters():  # as an optimizer with a copy of each parameter in a higher precision
    if parameter.numel():
        optimizer.state[parameter] = {"copy": parameter.detach().double(), "momentum": torch.zeros_like(parameter)}
try:
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]["weight"]
    observed: object = {name: value.dtype for name, value in state.items()}
except AssertionError as error:
    observed = str(error)
report({"copy": torch.float64, "momentum": torch.float32}, observed)
