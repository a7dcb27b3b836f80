# Full state dicts silently lose the versions of modules, which convert their own tensors as if these were old
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 full_state_versions.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


class Versioned(torch.nn.Linear):
    """A layer whose weights were half as large in version 1."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


dist.init_process_group("gloo")
model, loaded = (torch.nn.Sequential(Versioned(2, 2, bias=False)) for _ in range(2))
torch.nn.init.ones_(model[0].weight)
fully_shard(model)
loaded.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
observed, expected = loaded[0].weight[0].tolist(), [1.0, 1.0]
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
