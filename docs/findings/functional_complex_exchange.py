# the functional all_to_all_single refuses complex tensors, the plain one takes them
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_complex_exchange.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


try:
    given = torch.ones(2 * size, dtype=torch.complex64)
    dist.all_to_all_single(torch.zeros_like(given), given)
    functional.wait_tensor(functional.all_to_all_single(given, None, None, dist.group.WORLD))
    observed = "no error"
except RuntimeError as e:
    observed = f"RuntimeError: {e}".splitlines()[0]
report("no error", observed)
