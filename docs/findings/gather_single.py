# gather_single and gather_into_tensor raise RuntimeError on gloo, which has gather
# unreported
# Seen with torch 2.15.0+cu132, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 gather_single.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()
if not hasattr(dist, "gather_single"):
    sys.exit(0)  # PyTorch has it since 2.14
output = torch.zeros(size) if rank == 0 else None
try:
    dist.gather_single(torch.tensor([1.0 + rank]), output, dst=0)
    observed = output.tolist() if output is not None else [1.0, 2.0]
except RuntimeError as error:
    observed = str(error).splitlines()[0]
print(f"rank {rank}: expected [1.0, 2.0], observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != [1.0, 2.0])
