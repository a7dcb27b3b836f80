# The forward of DDP fails if delayed parameters are not float32: RuntimeError
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 ddp_delayed_dtypes.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()

module = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(2))).double()
model = DistributedDataParallel(
    module,
    delay_all_reduce_named_params=[("1.weight", module[1].weight)],
    param_to_hook_all_reduce=module[0].weight,
)
try:
    model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    observed = "trained"
except RuntimeError as error:
    observed = str(error).splitlines()[0]
expected = "trained"
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
