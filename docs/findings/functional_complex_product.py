# The functional reduce_scatter_tensor silently takes products, minima and maxima of real and imaginary parts alone
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_complex_product.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


given = torch.full((size,), complex(rank + 1, 1))  # 1+1j, 2+1j, ...
product = complex(1)
for r in range(size):
    product *= complex(r + 1, 1)
try:
    found = functional.reduce_scatter_tensor(given, "product", 0, dist.group.WORLD).tolist()
except (RuntimeError, ValueError) as error:  # as all_reduce and the regular reduce_scatter_tensor do
    report("refused", f"refused: {error}"[:7])
report([product], found)
