# With fullgraph=True, torch.compile refuses hash(dist.group)
# unreported
# Seen with torch 2.11.0+cu130, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 compiled_class_hash.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist


def function(x: torch.Tensor) -> torch.Tensor:
    return x + hash(dist.group) % 7


expected = function(torch.zeros(1)).item()
try:
    observed: object = torch.compile(function, backend="eager", fullgraph=True)(torch.zeros(1)).item()
except torch._dynamo.exc.Unsupported as e:
    observed = str(e).splitlines()[0]
print(f"expected {expected}, observed {observed}", flush=True)
sys.exit(0 if observed == expected else 1)
