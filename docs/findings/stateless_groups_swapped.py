# Loading an optimizer without states silently swaps settings of groups in another order, and fails for several ones
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 stateless_groups_swapped.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
fully_shard(model)
first, second = (list(layer.parameters()) for layer in model)
saved = get_optimizer_state_dict(model, torch.optim.SGD([{"params": first, "lr": 1.0}, {"params": second, "lr": 2.0}]))
turned = torch.optim.SGD([{"params": second, "lr": 3.0}, {"params": first, "lr": 4.0}])
set_optimizer_state_dict(model, turned, saved)
observed = [[group["lr"] for group in turned.param_groups]]

several = [torch.optim.SGD(parameters, lr=1.0) for parameters in (first, second)]
try:
    set_optimizer_state_dict(model, several, get_optimizer_state_dict(model, several))
    observed.append("loaded")
except ValueError as e:
    observed.append(f"ValueError: {e}")
expected = [[2.0, 1.0], "loaded"]
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
