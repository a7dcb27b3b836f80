# The whole state of a replicated model can't be set where one parameter has two names in one module
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_two_names.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(2, 2))
        self.two = self.one


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
model = Model()
saved = model.state_dict()
replicate(model)
try:
    set_model_state_dict(model, saved, options=StateDictOptions(full_state_dict=True))
    observed = "set"
except RuntimeError as e:
    observed = f"RuntimeError: {e}"
print(f"rank {rank}: expected set, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == "set" else 1)
