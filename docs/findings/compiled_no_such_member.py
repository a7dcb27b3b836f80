# torch.compile of hasattr(group, name) is an internal error if the group has no such attribute
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 compiled_no_such_member.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
group = dist.new_group([0])


def function(x: torch.Tensor) -> object:
    return x + 1, hasattr(group, "nothing"), getattr(group, "nothing", 5)


def told(call: object) -> str:
    try:
        return str(call(torch.ones(1)))
    except Exception as error:
        return type(error).__name__ + ": " + str(error).splitlines()[0]


expected, observed = told(function), told(torch.compile(function, backend="eager"))
print(f"rank 0: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
