# a collective on a group without the caller does nothing, without an error
# https://github.com/pytorch/pytorch/issues/67600
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=3 not_a_member.py
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


group = dist.new_group([1, 2])
observed = "an error"
if rank == 0:
    try:
        dist.all_reduce(torch.ones(1), group=group)
        observed = "no error"
    except (ValueError, RuntimeError):
        pass
report("an error", observed)
