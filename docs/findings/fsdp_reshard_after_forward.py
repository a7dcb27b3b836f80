# set_reshard_after_forward of a module replicated on FSDP2 is an AssertionError without a word
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_reshard_after_forward.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

model = replicate(nn.Linear(1, 1))
try:
    model.set_reshard_after_forward(False)
    observed = "nothing"
except Exception as e:
    observed = f"{type(e).__name__}: {e}"
print(f"rank {rank}: expected nothing, or an error that says why; observed {observed!r}", flush=True)
dist.destroy_process_group()
sys.exit(1 if observed == "AssertionError: " else 0)
