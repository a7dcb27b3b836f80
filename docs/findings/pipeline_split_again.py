# pipeline() with a split_spec changes the given model: a second call silently splits it at the first call's place too
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 pipeline_split_again.py
# It exits with 1 where the defect is there. With the same place twice, the model recurses without end.

import sys

import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline

x = torch.ones(2, 4)
observed = {}
for first, second in (("1", "2"), ("1", "1")):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    found = []
    try:
        found.append(pipeline(model, (x,), split_spec={first: SplitPoint.BEGINNING}).num_stages)
        found.append(pipeline(model, (x,), split_spec={second: SplitPoint.BEGINNING}).num_stages)
    except RuntimeError as error:
        found.append(f"{type(error).__name__}: {str(error).splitlines()[0][:60]}")
    try:
        model(x)
    except RecursionError as error:
        found.append(f"RecursionError in the model's own forward: {error}")
    observed[first, second] = found
expected = {key: [2, 2] for key in observed}
print(f"expected {expected}, observed {observed}", flush=True)
sys.exit(observed != expected)
