# clip_grad_norm_ with an infinity norm raises on a rank without elements of a gradient alone, and others wait for it
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 clip_infinity_without_elements.py
# It exits with 1 where the defect is there.

import math
import os
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


def report(observed: object) -> None:
    """Say what came, and leave at once: other ranks may still wait."""
    print(f"rank {dist.get_rank()}: expected 2.0, observed {observed}", flush=True)
    os._exit(observed != 2.0)


dist.init_process_group("gloo", timeout=timedelta(seconds=5))
threading.Timer(15, report, ["a hang"]).start()
model = torch.nn.Linear(3, 1, bias=False)  # of which rank 0 has the row
fully_shard(model)
model.weight.grad = torch.ones_like(model.weight) * 2
try:
    report(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=math.inf).full_tensor().item())
except RuntimeError as e:
    report(f"RuntimeError: {str(e)[:80]}")
