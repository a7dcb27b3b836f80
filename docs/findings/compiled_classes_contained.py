# with fullgraph=True, torch.compile refuses to ask whether ProcessGroup or a placement's class is a key of a dictionary
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 compiled_classes_contained.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


kept = {DeviceMesh: 1, Shard: 2, Replicate: 3, dist.ProcessGroup: 4}


def function(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if Shard in kept and dist.ProcessGroup in kept else x


outcomes: list[object] = []
for call in function, torch.compile(function, backend="eager", fullgraph=True):
    try:
        outcomes.append(call(torch.zeros(1)).tolist())
    except Exception as error:
        outcomes.append(f"{type(error).__name__}: {error}".splitlines()[0])
report(*outcomes)
