# With parameters_as_bucket_view, ranks of a ZeroRedundancyOptimizer silently diverge after an added group is unfrozen
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 zero_unfrozen_later.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group("gloo")
trained = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
frozen = [torch.nn.Parameter(torch.ones(2), requires_grad=False) for _ in range(2)]
optimizer = ZeroRedundancyOptimizer(trained, torch.optim.SGD, lr=0.5, parameters_as_bucket_view=True)
optimizer.add_param_group({"params": frozen})
for parameter in frozen:
    parameter.requires_grad_(True)
for parameter in trained + frozen:
    parameter.grad = torch.ones(2)
optimizer.step()
observed, expected = [parameter[0].item() for parameter in trained + frozen], [0.5] * 4
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
