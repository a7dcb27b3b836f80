# The full optimizer state of FSDP1 has one step count for all parameters of a flat one, which counts too fast elsewhere
# https://github.com/pytorch/pytorch/pull/96260
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_shared_step_count.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
plain = nn.Linear(4, 4)
saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
state = FullyShardedDataParallel.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_ID, plain)
fresh = torch.optim.Adam(plain.parameters())
fresh.load_state_dict(state)
plain(torch.ones(2, 4)).sum().backward()
fresh.step()
report([2.0, 2.0], [float(each["step"]) for each in fresh.state.values()])
