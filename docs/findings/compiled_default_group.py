# The default group can't be returned from compiled code, or used by it with compile_on_one_rank: an AssertionError
# unreported
# Seen with torch 2.12.1+cu130, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_default_group.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def all_gather(x: torch.Tensor) -> torch.Tensor:
    whole = x.new_empty(size * len(x))
    dist.all_gather_into_tensor(whole, x)
    return whole


def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    mine = x.new_empty(len(x) // size)
    dist.reduce_scatter_tensor(mine, x)
    return mine


def all_to_all(x: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x)
    return received


def returned(x: torch.Tensor) -> tuple[torch.Tensor, dist.ProcessGroup | None]:
    return x + 1, dist.group.WORLD


expected, observed = list[str](), list[str]()
for call in (all_reduce, all_gather, reduce_scatter, all_to_all):
    try:
        with dist.config.patch(compile_on_one_rank=True):
            torch.compile(call, backend="eager", fullgraph=True)(torch.ones(4))
    except AssertionError:
        observed.append(f"{call.__name__} raises")
try:
    torch.compile(returned, backend="eager")(torch.ones(4))
except AssertionError:
    observed.append("returning it raises")
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(0 if observed == expected else 1)
