# with fullgraph=True, torch.compile refuses placements in a list of another class than list, for methods of DTensors
# https://github.com/pytorch/pytorch/pull/168149
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 compiled_placement_sequences.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


class Placements(list):
    """The documentation says that placements are a sequence."""


mesh = init_device_mesh("cpu", (size,))


def function(x: torch.Tensor) -> torch.Tensor:
    return DTensor.from_local(x, mesh, [Shard(0)]).to_local(grad_placements=Placements([Shard(0)])) + 1


outcomes: list[object] = []
for call in function, torch.compile(function, backend="eager", fullgraph=True):
    try:
        outcomes.append(call(torch.zeros(1)).tolist())
    except Exception as error:
        outcomes.append(f"{type(error).__name__}: {error}".splitlines()[0])
report(*outcomes)
