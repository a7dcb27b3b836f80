# FSDP1's fp16_compress_hook and bf16_compress_hook raise on the CPU
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp1_compressed_on_host.py
# It exits with 1 where the defect is there.

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
failed = False
for hook in (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook):
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    model.register_comm_hook(default_hooks.LowPrecisionState(dist.group.WORLD), hook)
    observed = "an averaged gradient"
    try:
        model(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        observed = f"{type(error).__name__}: {str(error)[:80]}"
        failed = True
    print(f"{hook.__name__}: expected an averaged gradient, observed {observed}", flush=True)
os._exit(failed)
