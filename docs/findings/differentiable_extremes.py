# The gradient of a differentiable reduction with max, min or product is silently not that of the operation
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 differentiable_extremes.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable

dist.init_process_group("gloo")
rank = dist.get_rank()
observed = {}
for name in ("MAX", "MIN", "PRODUCT"):
    x = torch.tensor(2.0 + rank, requires_grad=True)
    try:
        differentiable.all_reduce(x, getattr(dist.ReduceOp, name)).backward()
        observed[name] = x.grad.item()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        observed[name] = f"{type(error).__name__}: {error}"
right = {"MAX": 2.0 * (rank == 1), "MIN": 2.0 * (rank == 0), "PRODUCT": 2.0 * (3 - rank)}
wrong = [name for name, found in observed.items() if isinstance(found, float) and found != right[name]]
print(f"rank {rank}: expected {right} or an error, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(bool(wrong))
