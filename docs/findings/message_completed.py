# the Work of a message isn't completed after the message has come, as long as nobody waits for it
# https://github.com/pytorch/pytorch/issues/30723
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 message_completed.py
# It exits with 1 where the defect is there.

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

tensor = torch.tensor([1.0 - rank])
work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
until = time.monotonic() + 3
while not (tensor.item() == 1 and work.is_completed()) and time.monotonic() < until:
    time.sleep(0.01)
observed = (tensor.item(), work.is_completed())
print(f"rank {rank}: expected (1.0, True), observed {observed}", flush=True)
work.wait()
dist.barrier()
dist.destroy_process_group()
sys.exit(0 if observed == (1.0, True) else 1)
