# A parameter with an optimizer in its backward is never freed
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 in_backward_memory.py
# It exits with 1 where the defect is there.

import gc
import sys
import weakref

import torch
from torch.distributed.optim import _apply_optimizer_in_backward

parameter = torch.nn.Parameter(torch.ones(1))
_apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.5})
alive = weakref.ref(parameter)
del parameter
gc.collect()
observed, expected = "alive" if alive() is not None else "freed", "freed"
print(f"expected {expected}, observed {observed}", flush=True)
sys.exit(observed != expected)
