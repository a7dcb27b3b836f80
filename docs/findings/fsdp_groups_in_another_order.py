# FSDP1's optim_state_dict_to_load gives parameters each other's states if the optimizer has its groups in another order
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_groups_in_another_order.py
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


layers = [FullyShardedDataParallel(nn.Linear(2, 2, bias=False), device_id=torch.device("cpu")) for _ in range(2)]
model = FullyShardedDataParallel(nn.Sequential(*layers), device_id=torch.device("cpu"))
one, two = ({"params": list(layer.parameters())} for layer in layers)
optimizer = torch.optim.SGD([one, two], lr=0.5, momentum=0.5)
model(torch.tensor([[1.0, 2.0]])).sum().backward()
optimizer.step()
saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
fresh = torch.optim.SGD([two, one], lr=0.5, momentum=0.5)
fresh.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, fresh, saved))
pairs = [(optimizer.state[p]["momentum_buffer"], fresh.state[p]["momentum_buffer"]) for p in model.parameters()]
report([True, True], [torch.equal(a, b) for a, b in pairs])
