# gather refuses complex tensors, though all_gather and scatter take them
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 gather_complex.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist

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
    tensor = torch.tensor([1 + 2j])
    dist.gather(tensor, [torch.zeros_like(tensor) for _ in range(size)] if rank == 0 else None, dst=0)
    observed = "no error"
except RuntimeError as e:
    observed = f"RuntimeError: {e}".splitlines()[0]
report("no error", observed)
