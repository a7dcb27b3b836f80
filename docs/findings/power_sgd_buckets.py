# On gloo, the PowerSGD hook hangs with several buckets: its callbacks wait in gloo's threads, in an order of each rank
# https://github.com/pytorch/pytorch/issues/48478
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 power_sgd_buckets.py
# It exits with 1 where the defect is there.

import os
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def report(observed: str) -> None:
    """Say what came, and leave at once: threads may still wait."""
    print(f"rank {dist.get_rank()}: expected ten steps, observed {observed}", flush=True)
    os._exit(observed != "ten steps")


dist.init_process_group("gloo", timeout=timedelta(seconds=5))
threading.Timer(15, report, ["a hang"]).start()
layers = [torch.nn.Linear(16, 16, bias=False) for _ in range(4)]
model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1e-4)
state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
for number in range(10):
    try:
        model(torch.ones(1, 16)).sum().backward()
    except RuntimeError as e:
        report(f"{type(e).__name__} in step {number}: {str(e)[-120:]}")
report("ten steps")
