# DDP with delay_all_reduce_named_params is never freed, nor is its model
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 ddp_delayed_memory.py
# It exits with 1 where the defect is there.

import gc
import sys
import weakref
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
model = DistributedDataParallel(
    module,
    delay_all_reduce_named_params=[("1.weight", module[1].weight)],
    param_to_hook_all_reduce=module[0].weight,
)
alive = weakref.ref(module)
del module, model
gc.collect()
observed, expected = "alive" if alive() is not None else "freed", "freed"
print(f"expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
