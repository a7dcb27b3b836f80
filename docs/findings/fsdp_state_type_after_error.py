# An error in a block of FSDP.state_dict_type leaves the modules with the type of the block
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_state_type_after_error.py
# It exits with 1 where the defect is there.

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

dist.init_process_group("gloo")
model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
expected = FullyShardedDataParallel.get_state_dict_type(model).state_dict_type
with (
    contextlib.suppress(KeyError),
    FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT),
):
    model.state_dict()["no such key"]
observed = FullyShardedDataParallel.get_state_dict_type(model).state_dict_type
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
