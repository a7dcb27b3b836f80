# torch.compile of a look-up of torch.distributed.group in a dictionary is an internal error, and no graph break
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 compiled_group_key.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))


def function(x: torch.Tensor) -> torch.Tensor:
    return x + {dist.GroupMember: 1, dist.group: 2}[dist.group]


try:
    observed = str(torch.compile(function, backend="eager")(torch.ones(1)).tolist())
except Exception as error:
    observed = type(error).__name__ + ": " + str(error).splitlines()[0]
print(f"rank 0: expected {function(torch.ones(1)).tolist()}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != "[3.0]")
