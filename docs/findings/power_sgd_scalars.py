# The PowerSGD hook raises for parameters without dimensions or without elements when it begins to compress
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 power_sgd_scalars.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


class Scaled(torch.nn.Linear):
    """A linear layer with another parameter."""

    def __init__(self, shape):
        super().__init__(16, 16, bias=False)
        self.other = torch.nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return super().forward(x).sum() + self.other.sum()


dist.init_process_group("gloo")
observed = {}
for shape in ((), (0, 2)):
    model = DistributedDataParallel(Scaled(shape))
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    observed[shape] = "four steps"
    for number in range(4):
        try:
            model(torch.ones(1, 16)).backward()
        except (IndexError, RuntimeError) as e:
            observed[shape] = f"{type(e).__name__} in step {number}: {str(e)[:60]}"
            break
expected = {(): "four steps", (0, 2): "four steps"}
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
