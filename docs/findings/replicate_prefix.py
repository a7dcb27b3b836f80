# Stripping "module." from a state dict loses a parameter of a model that has a child called module
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_prefix.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

model = nn.ModuleDict({"module": nn.ModuleDict({"layer": nn.Linear(1, 1)}), "layer": nn.Linear(1, 1)})
state = DistributedDataParallel(model).state_dict()
consume_prefix_in_state_dict_if_present(state, "module.")
expected, observed = sorted(model.state_dict()), sorted(state)
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == expected else 1)
