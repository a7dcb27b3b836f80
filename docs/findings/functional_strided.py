# functional all_gather, reduce_scatter and all_to_all_single refuse a tensor that is not contiguous
# mended in PyTorch 2.12
# Seen with torch 2.11.0+cu130, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_strided.py
# It exits with 1 where the defect is there.

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

warnings.simplefilter("ignore", FutureWarning)  # newer names do the same
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()
columns = torch.arange(2.0 * size).reshape(size, 2).t()
group = dist.group.WORLD
calls = {
    "all_gather": lambda: functional.all_gather_tensor(columns, 0, group),
    "reduce_scatter": lambda: functional.reduce_scatter_tensor(columns, "sum", 0, group),
    "all_to_all_single": lambda: functional.all_to_all_single(columns, None, None, group),
}
observed = {}
for name, call in calls.items():
    try:
        observed[name] = list((call() + 0).shape)
    except (AssertionError, RuntimeError) as error:
        observed[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
expected = {"all_gather": [4, 2], "reduce_scatter": [1, 2], "all_to_all_single": [2, 2]}
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
