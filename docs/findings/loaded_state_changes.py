# set_model_state_dict silently changes the dict that it loads: names under DDP or torch.compile, to shards under FSDP2
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 loaded_state_changes.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
observed, expected = {}, {}
whole = StateDictOptions(full_state_dict=True)
for name in ("DDP", "compiled", "FSDP2"):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    state = {"0.weight": torch.ones(2, 2)}
    if name == "DDP":
        model = DistributedDataParallel(model)
    elif name == "compiled":
        model = torch.compile(model, backend="eager")
    else:
        fully_shard(model)
    set_model_state_dict(model, state, options=whole)
    observed[name] = {key: type(value).__name__ for key, value in state.items()}
    expected[name] = {"0.weight": "Tensor"}
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
