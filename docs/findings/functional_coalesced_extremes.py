# The backward of the functional all_reduce_coalesced always fails for max and min
# unreported
# Seen with torch 2.15.0+cu132, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_coalesced_extremes.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


x = torch.tensor([float(rank)], requires_grad=True)
(y,) = functional.all_reduce_coalesced([x], "max", dist.group.WORLD)
expected: object = [2.0 * rank]  # the sum of both ranks' gradients, for the rank with the maximum
observed: object = "an error"
try:
    y.sum().backward()
    observed = x.grad.tolist()
except RuntimeError as error:
    if "only supports" in str(error):  # before PyTorch 2.15, which refuses these gradients and says so
        expected = "an error"
report(expected, observed)
