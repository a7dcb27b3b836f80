# on the host, a random operation on a DTensor silently ignores the generator that it is given
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_generator.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


x = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (size,)), [Shard(0)])
generator = torch.Generator().manual_seed(1)
own, default = generator.get_state(), torch.get_rng_state()
x.uniform_(generator=generator)
advanced = [not torch.equal(own, generator.get_state()), not torch.equal(default, torch.get_rng_state())]
report("only the generator advances: True, False", f"only the generator advances: {advanced[0]}, {advanced[1]}")
