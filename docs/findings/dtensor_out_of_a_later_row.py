# mv with out= silently writes into other rows of a sharded DTensor, if an earlier call wrote into a replicated one
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64. Since 2.14, sum and vector_norm do it as well.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_out_of_a_later_row.py
# It exits with 1 where the defect is there: the row becomes replicas, and its DTensor stays sharded.

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

warnings.simplefilter("ignore")  # of an output that is resized, where the defect is there
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
whole = torch.arange(20.0).view(4, 5)
for placement in Replicate(), Shard(1):
    table = distribute_tensor(torch.zeros(3, 5), mesh, [placement])
    x, vector = (distribute_tensor(t, mesh, [Replicate()]) for t in (whole, torch.ones(4)))
    torch.mv(x.t(), vector, out=table[1])
report([[0.0] * 5, [30.0, 34.0, 38.0, 42.0, 46.0], [0.0] * 5], table.full_tensor().tolist())
