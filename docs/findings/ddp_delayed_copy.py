# Delayed parameters are silently not averaged in a copy of a DDP module
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 ddp_delayed_copy.py
# It exits with 1 where the defect is there.

import copy
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()

module = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(2)))
for parameter in module.parameters():
    torch.nn.init.ones_(parameter)
model = DistributedDataParallel(
    module,
    delay_all_reduce_named_params=[("1.weight", module[1].weight)],
    param_to_hook_all_reduce=module[0].weight,
)
copied = copy.deepcopy(model)
copied(torch.full((1, 1), 1.0 + rank)).sum().backward()
time.sleep(1)  # a delayed all-reduce is not waited for
observed, expected = [parameter.grad.item() for parameter in copied.parameters()], [1.5, 1.5]
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
