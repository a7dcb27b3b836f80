# a Partial("avg") that compiled code makes and returns is a Partial("sum")
# unreported
# Seen with torch 2.11.0+cu130, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 compiled_made_placements.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial

dist.init_process_group("gloo", timeout=timedelta(seconds=20))


def function(x: torch.Tensor) -> object:
    return x + 1, Partial("avg")


def told(call: object) -> str:
    try:
        return str(call(torch.ones(1)))
    except Exception as error:
        return type(error).__name__ + ": " + str(error).splitlines()[0]


expected, observed = told(function), told(torch.compile(function, backend="eager"))
print(f"rank 0: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
