# torch.distributed.nn.functional.all_to_all, and the gradient of its all_gather, fail in subgroups
# https://github.com/pytorch/pytorch/issues/120213
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=3 differentiable_exchange.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


group = dist.new_group([1, 2])
observed: object = "exchanged"
if rank > 0:
    try:
        differentiable.all_to_all([torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(2)], group)
        observed = "exchanged"
    except (ValueError, RuntimeError) as e:
        observed = f"{type(e).__name__}: {e}"
report("exchanged", observed)
