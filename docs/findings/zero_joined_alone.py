# Join with a ZeroRedundancyOptimizer alone hangs as soon as a rank has joined
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 zero_joined_alone.py
# It exits with 1 where the defect is there.

import os
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
rank = dist.get_rank()


def report(observed: str) -> None:
    """Say what came, and leave at once: the other rank may still wait."""
    print(f"rank {rank}: expected three steps, observed {observed}", flush=True)
    os._exit(observed != "three steps")


threading.Timer(10, report, ["a hang"]).start()
model = nn.Linear(2, 2, bias=False)
nn.init.zeros_(model.weight)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)
model.weight.grad = torch.ones_like(model.weight)
try:
    with Join([optimizer]):
        for _ in range(2 + rank):
            optimizer.step()
    report("three steps")
except RuntimeError as error:  # the timeout, or that the other rank has left
    report(f"{type(error).__name__}: {error}".splitlines()[0])
