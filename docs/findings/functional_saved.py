# Saving or pickling the result of a functional collective silently does not wait for it
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_saved.py
# It exits with 1 where the defect is there.

import io
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo")
rank = dist.get_rank()

torch.save(functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD), io.BytesIO())  # imports what it needs
dist.barrier()
if rank == 1:
    time.sleep(1)
result = functional.all_reduce(torch.tensor([1.0 + rank]), "sum", dist.group.WORLD)
file = io.BytesIO()
torch.save(result, file)
functional.wait_tensor(result)
file.seek(0)
observed, expected = torch.load(file, weights_only=False).tolist(), [3.0]
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
