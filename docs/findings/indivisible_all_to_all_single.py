# all_to_all_single takes a dimension that the world size does not divide, and loses data
# https://github.com/pytorch/pytorch/issues/101380
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 indivisible_all_to_all_single.py
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


out = torch.full((3,), -1.0)
try:
    dist.all_to_all_single(out, torch.arange(3.0))
    observed = f"no error, output {out.tolist()}"
except (ValueError, RuntimeError):
    observed = "an error"
report("an error", observed)
