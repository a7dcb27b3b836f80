# reduce of a lazily conjugated tensor is wrong, where all_reduce refuses it
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 conjugate_bit_reduce.py
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


lazy = torch.tensor([complex(1, rank + 1)]).conj()
total = sum(complex(1, -(r + 1)) for r in range(size))
try:
    dist.reduce(lazy, 0)
except RuntimeError:
    report("refused", "refused")
if rank == 0:
    report([total], lazy.tolist())
report(None, None)
