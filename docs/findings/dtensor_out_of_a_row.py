# amax and other reductions with out= silently write each rank's own into a DTensor of replicas that they get a row of
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_out_of_a_row.py
# It exits with 1 where the defect is there: the row gets the placements of the result, and its DTensor keeps its own.

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
expected = torch.zeros(3, 5)
table = distribute_tensor(expected.clone(), mesh, [Replicate()])
try:
    torch.amax(distribute_tensor(whole, mesh, [Shard(0)]), 0, out=table[1])
    torch.amax(whole, 0, out=expected[1])
except RuntimeError as e:
    print(f"refused: {e}")  # then it should change nothing
report(expected.tolist(), table.to_local().tolist())
