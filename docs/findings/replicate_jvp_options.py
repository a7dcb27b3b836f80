# torch.func.jvp of a module under DDP fails with find_unused_parameters or static_graph
# https://github.com/pytorch/pytorch/issues/182661
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_jvp_options.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()


x = torch.full((1, 1), 1.0 + rank)
observed = []
for option in ("find_unused_parameters", "static_graph"):
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), **{option: True})
    try:
        output, derivative = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        (output + 3 * derivative).sum().backward()  # ranks have gradients 1 + 3 and 2 + 3
        observed.append(model.module.weight.grad.item())
    except RuntimeError as e:
        observed.append(f"RuntimeError: {e}".splitlines()[0])
print(f"rank {rank}: expected [4.5, 4.5], observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == [4.5, 4.5] else 1)
