# mean, nll_loss, rms_norm and split gather a batch in shards that has fewer rows than there are ranks
# unreported
# Seen with torch 2.15.0+cu132 and 2.14.1, gloo, Python 3.11, Linux x86-64; not there in 2.13.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_row_averaged.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (2,))
row = distribute_tensor(torch.arange(4.0).reshape(1, 4), mesh, [Shard(0)])
results = row.mean(1), functional.rms_norm(row, (4,)), row.split(2, 1)[0]
report(["S(0)"] * 3, [str(x.placements[0]).replace("Shard(dim=0)", "S(0)") for x in results])
