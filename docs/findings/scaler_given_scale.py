# update of a ShardedGradScaler or GradScaler raises for a new_scale of shape (1,), which its own check allows
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 scaler_given_scale.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

dist.init_process_group("gloo")
scaler = ShardedGradScaler("cpu", init_scale=2.0)
scaler.scale(torch.ones(1))
try:
    scaler.update(torch.tensor([8.0]))  # "a float or a 1-element" tensor
    observed = str(scaler.get_scale())
except RuntimeError as error:
    observed = f"RuntimeError: {error}"
print(f"expected 8.0, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != "8.0")
