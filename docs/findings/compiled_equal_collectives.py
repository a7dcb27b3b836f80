# Compiled code with a backward launches one of two equal collectives, so that ranks with different ones hang
# unreported; https://github.com/pytorch/pytorch/issues/146045 asks for it where all ranks have the same code
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_equal_collectives.py
# It exits with 1 where the defect is there.

import os
import threading

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce

dist.init_process_group("gloo")
rank = dist.get_rank()


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Sum what rank 0 gives twice, and rank 1 in two forms."""
    one = all_reduce(x, "sum", dist.group.WORLD)
    other = all_reduce(x if rank == 0 else x + 1, "sum", dist.group.WORLD)
    return (one + other.cos()) * w


x, w = torch.full((4,), rank + 1.0), torch.ones(4, requires_grad=True)
expected = step(x, w).tolist()
found = []
compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
thread = threading.Thread(target=lambda: found.append(compiled(x, w).tolist()), daemon=True)
thread.start()
thread.join(20)
observed = found[0] if found else "nothing after 20 s"
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
os._exit(observed != expected)
