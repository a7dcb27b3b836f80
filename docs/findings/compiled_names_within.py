# The optimizer state of FSDP1 over a compiled model can't be set if a parameter's name ends with that of another
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_names_within.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()


def outcome(*names: str) -> str:
    """Set the state of a model whose layers have such names."""
    model = nn.Sequential()
    for name in names:
        parent, _, last = name.rpartition(".")
        if parent:
            model.add_module(parent, nn.Sequential())
        model.get_submodule(parent).add_module(last, nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager")
    wrapped = FullyShardedDataParallel(compiled, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(wrapped.parameters())
    wrapped(torch.ones(2)).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(wrapped, optimizer)
    try:
        set_optimizer_state_dict(wrapped, torch.optim.Adam(wrapped.parameters()), state)
    except (KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "set"


names = {"other names": ("layer.norm", "last"), "a name within another": ("layer.norm", "norm")}
expected = dict.fromkeys(names, "set")
observed = {what: outcome(*of) for what, of in names.items()}
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
