# from_dlpack, share_memory_ and setting a parameter's data take a collective's pending result without memory: a crash
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_memory_taken.py
# It exits with 1 where the defect is there.

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def set_data(pending: torch.Tensor) -> torch.Tensor:
    """Give a parameter the result as its data."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.data = pending
    return parameter + 0


ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "arithmetic": lambda pending: pending + 0,
    "torch.from_dlpack": lambda pending: torch.from_dlpack(pending) + 0,
    "share_memory_": lambda pending: pending.share_memory_() + 0,
    "parameter.data": set_data,
}
expected = dict.fromkeys(ways, "right")
observed = {}
for name, way in ways.items():
    result = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    dist.barrier()  # the collective has ended, and nothing has read its result
    child = os.fork()  # since a crash would end the script
    if not child:
        os._exit(0 if way(result).tolist() == [size, size] else 1)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    observed[name] = "right" if ended == 0 else "wrong" if ended > 0 else f"crashed by signal {-ended}"
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
