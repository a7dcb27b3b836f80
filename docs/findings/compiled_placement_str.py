# with fullgraph=True, torch.compile refuses str(placement)
# unreported
# Seen with torch 2.14.1+cu130, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 compiled_placement_str.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


placements = (Shard(1), Shard(0))


def function(x: torch.Tensor) -> tuple[torch.Tensor, str, str]:
    return x, str(placements[0]), str(placements)


outcomes: list[object] = []
for call in function, torch.compile(function, backend="eager", fullgraph=True):
    try:
        outcomes.append(call(torch.zeros(1))[1:])
    except Exception as error:
        outcomes.append(f"{type(error).__name__}: {error}".splitlines()[0])
report(*outcomes)
