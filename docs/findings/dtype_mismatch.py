# all_reduce of float32 on one rank and int32 on the other gives wrong numbers without an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtype_mismatch.py
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


tensor = torch.ones(4, dtype=torch.int32 if rank else torch.float32)
try:
    dist.all_reduce(tensor)
    observed = f"no error, {tensor.tolist()}"
except (ValueError, RuntimeError):
    observed = "an error"
report("an error", observed)
