# DDP refuses to delay the all-reduce of all parameters: ValueError about devices
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 ddp_delayed_all.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()

module = torch.nn.Linear(1, 1, bias=False)
try:
    DistributedDataParallel(
        module,
        delay_all_reduce_named_params=list(module.named_parameters()),
        param_to_hook_all_reduce=module.weight,
    )
    observed = "made"
except ValueError as error:
    observed = str(error)
expected = "made"
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
