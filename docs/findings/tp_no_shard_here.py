# a sharded tensor without a shard on this rank asks CUDA for its device, unless its group is gloo's
# unreported
# Seen with torch 2.13.0+cpu, Python 3.11, Linux x86-64, on another accelerator than CUDA; the fake backend shows it.
# Run:  torchrun --standalone --nproc-per-node=1 tp_no_shard_here.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
saved = DTensorExtensions(torch.cpu).chunk_tensor(torch.ones(1, 2), 1, 2, 1, dist.group.WORLD)
try:
    observed = str(saved.device)
except (AssertionError, RuntimeError) as e:
    observed = f"{type(e).__name__}: {e}"
print(f"rank 1: expected cpu, observed {observed}")
dist.destroy_process_group()
sys.exit(observed != "cpu")
