# context_parallel silently mixes up buffers that are views of one tensor, as inputs and labels may be
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 context_parallel_overlap.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (size,))
tokens = torch.arange(18).reshape(2, 9)
inputs, labels = tokens[:, :-1], tokens[:, 1:]
with context_parallel(mesh, buffers=[inputs, labels], buffer_seq_dims=[1, 1]):
    inside = bool((labels == inputs + 1).all())  # labels are the next tokens
report((True, True), (inside, torch.equal(tokens, torch.arange(18).reshape(2, 9))))
