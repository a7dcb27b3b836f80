# the end of DDP's join() silently replaces the program's filters of warnings: those that are errors no longer raise
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 join_warning_filters.py
# It exits with 1 where the defect is there.

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()


def outcome() -> str:
    """Return what comes of a warning."""
    try:
        warnings.warn("something", stacklevel=2)
    except UserWarning:
        return "raised"
    return "printed"


model = DistributedDataParallel(nn.Linear(1, 1))
warnings.simplefilter("error", UserWarning)
observed = [outcome()]
with model.join():
    model(torch.ones(1, 1)).sum().backward()
observed.append(outcome())
expected = ["raised", "raised"]
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
