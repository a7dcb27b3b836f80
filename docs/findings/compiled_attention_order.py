# After a graph break, compiled code ignores the order of backends that sdpa_kernel(set_priority=True) sets
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_attention_order.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


ORDER = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]


@torch.compiler.disable
def order() -> list[str]:
    return [backend.name for backend in _cur_sdpa_kernel_backends(with_priority=True)]


def step(x: torch.Tensor) -> list[str]:
    dist.all_reduce(x)
    with sdpa_kernel(ORDER, set_priority=True):
        return order()


report(*(function(torch.ones(1)) for function in (step, torch.compile(step, backend="eager"))))
