# set_model_state_dict from rank 0 silently reorders the elements of a channels-last or transposed tensor
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 broadcast_memory_formats.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
weight = torch.arange(32.0).view(4, 2, 2, 2)
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
model = torch.nn.Conv2d(2, 4, 2, bias=False)
fully_shard(model)
state = {"weight": weight.to(memory_format=torch.channels_last)}
set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=options)
observed, expected = model.weight.full_tensor().flatten()[-4:].tolist(), weight.flatten()[-4:].tolist()
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
