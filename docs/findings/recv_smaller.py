# recv of a longer message aborts the process
# https://github.com/pytorch/pytorch/issues/113376
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 recv_smaller.py
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


tensor = torch.zeros(4)
if rank == 0:
    dist.send(torch.ones(5), 1)
else:
    try:
        dist.recv(tensor, 0)  # std::terminate: torchrun itself then ends with an exit code that is not 0
    except (ValueError, RuntimeError):
        pass
report("an error", "an error")
