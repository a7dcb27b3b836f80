# The state of a model that has one module under two names can't be set under DDP, and a full state not under FSDP2
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 shared_module_state.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
observed = {}
for name in ("DDP", "FSDP2"):
    layer = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(layer, torch.nn.ReLU(), layer)
    model = DistributedDataParallel(model) if name == "DDP" else fully_shard(model)
    options = StateDictOptions(full_state_dict=name == "FSDP2")
    try:
        set_model_state_dict(model, dict(get_model_state_dict(model, options=options)), options=options)
        observed[name] = "set"
    except RuntimeError as e:
        observed[name] = f"RuntimeError: {' '.join(str(e).split())[:160]}"
expected = {"DDP": "set", "FSDP2": "set"}
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
