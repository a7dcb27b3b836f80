# Under DDP or torch.compile, the state of a module whose extra state is None can't be set: a key is said to be missing
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 extra_state_none.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel


class Extra(torch.nn.Linear):
    """A layer that has no extra state yet."""

    def get_extra_state(self):
        return None

    def set_extra_state(self, state):
        pass


dist.init_process_group("gloo")
model = DistributedDataParallel(Extra(2, 2))
try:
    set_model_state_dict(model, get_model_state_dict(model))
    observed = "set"
except RuntimeError as e:
    observed = f"RuntimeError: {e}"
print(f"rank {dist.get_rank()}: expected set, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != "set")
