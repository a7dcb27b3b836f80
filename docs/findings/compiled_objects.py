# torch.compile of broadcast_object_list or all_gather_object is an internal error, and no graph break
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_objects.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()


def function(x: torch.Tensor) -> torch.Tensor:
    objects = [rank + 5]
    dist.broadcast_object_list(objects, 0)
    return x + objects[0]


try:
    observed = str(torch.compile(function, backend="eager")(torch.zeros(1)).item())
except Exception as error:
    observed = type(error).__name__ + ": " + str(error).splitlines()[0]
print(f"rank {rank}: expected 5.0, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != "5.0")
