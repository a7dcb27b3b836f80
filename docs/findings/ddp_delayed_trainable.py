# If the all-reduce of all trainable parameters is delayed, beside frozen ones, the forward of DDP raises AttributeError
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 ddp_delayed_trainable.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()

module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
for parameter in module.parameters():
    nn.init.ones_(parameter)
module[0].requires_grad_(False)
model = DistributedDataParallel(
    module,
    delay_all_reduce_named_params=[("1.weight", module[1].weight)],
    param_to_hook_all_reduce=module[1].weight,
)
expected: object = [[1.0]]
try:
    observed: object = model(torch.ones(1, 1)).tolist()
except AttributeError as error:
    observed = str(error)
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
