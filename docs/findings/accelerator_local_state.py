# FSDP1's local state dicts can't be offloaded from a device: the copies of shards that require gradients do not
# https://github.com/pytorch/pytorch/issues/103730
# Seen on the sample accelerator (fixtures/vendors/sim; it has to be installed) with torch 2.13.0+cpu, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 accelerator_local_state.py
# It exits with 1 where the defect is there.

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, LocalStateDictConfig, StateDictType

rank, device = int(os.environ["RANK"]), torch.accelerator.current_accelerator()
torch.accelerator.set_device_index(rank)
dist.init_process_group(dist.get_default_backend_for_device(device))
model = FullyShardedDataParallel(nn.Linear(4, 2).to(device), device_id=torch.device(device.type, rank))
config = LocalStateDictConfig(offload_to_cpu=True)
try:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT, config):
        observed = str({value.device.type for value in model.state_dict().values()})
except Exception as e:
    observed = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
print(f"rank {rank}: expected {{'cpu'}}, observed {observed}", flush=True)
os._exit(observed != "{'cpu'}")
