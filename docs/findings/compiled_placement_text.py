# torch.compile of repr(placement) is an AssertionError of Dynamo's
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 compiled_placement_text.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
placement = Shard(1)


def function(x: torch.Tensor) -> object:
    return x + 1, repr(placement)


def told(call: object) -> str:
    try:
        return str(call(torch.ones(1)))
    except Exception as error:
        return type(error).__name__ + ": " + str(error).splitlines()[0]


expected, observed = told(function), told(torch.compile(function, backend="eager"))
print(f"rank 0: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
