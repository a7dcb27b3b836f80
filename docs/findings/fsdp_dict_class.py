# Under FSDP1, a dict of a class of its own that a forward returns, as a defaultdict, is a plain dict
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_dict_class.py
# It exits with 1 where the defect is there.

import sys
from collections import defaultdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


class Model(nn.Module):
    """Return a defaultdict."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> defaultdict[str, torch.Tensor]:
        """Return the result, and zeros for all else."""
        result = defaultdict(lambda: torch.zeros(2))
        result["values"] = self.weight * x
        return result


model = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"))
report("defaultdict", type(model(torch.ones(2))).__name__)
