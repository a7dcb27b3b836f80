# on the host, every state in a full state dict of an optimizer is the last one, with original parameters
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_full_optimizer_state.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

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
optimizer = torch.optim.Adam(model.parameters())
model(torch.full((1, 2), 3.0)).sum().backward()
optimizer.step()
with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
# Gradients are 3, so their averages are 0.3 and those of their squares 0.009.
report([0.3, 0.009], [round(float(state["weight"][name][0, 0]), 4) for name in ("exp_avg", "exp_avg_sq")])
