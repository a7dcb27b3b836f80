# FSDP1 silently loads an optimizer's states of a channels-last or transposed weight in another order of elements
# https://github.com/NVIDIA/physicsnemo/pull/1597
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_optimizer_layouts.py
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


layer = nn.Conv2d(2, 1, (1, 2), bias=False).to(memory_format=torch.channels_last)
model = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model(torch.tensor([[[[1.0, 2.0]], [[3.0, 4.0]]]])).sum().backward()
optimizer.step()
momenta = []
for _ in range(2):  # saved, loaded, and saved again
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    momenta.append(state["state"]["weight"]["momentum_buffer"].flatten().tolist())
    optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state))
report([[1.0, 2.0, 3.0, 4.0]] * 2, momenta)
