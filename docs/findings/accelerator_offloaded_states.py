# with one data-parallel rank and original parameters, states of optimizers that are to be offloaded stay on the device
# unreported
# Seen on the sample accelerator (fixtures/vendors/sim; it has to be installed) with torch 2.13.0+cpu, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 accelerator_offloaded_states.py
# It exits with 1 where the defect is there.

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

device = torch.accelerator.current_accelerator()
torch.accelerator.set_device_index(0)
dist.init_process_group(dist.get_default_backend_for_device(device))
plain = nn.Linear(4, 2).to(device)
model = FullyShardedDataParallel(plain, device_id=torch.device(device.type, 0), use_orig_params=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
model(torch.ones(1, 4, device=device)).sum().backward()
optimizer.step()
configs = ShardedStateDictConfig(), ShardedOptimStateDictConfig(offload_to_cpu=True)
with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs):
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
observed = {state["momentum_buffer"].device.type for state in saved["state"].values()}
print(f"expected {{'cpu'}}, observed {observed}", flush=True)
os._exit(observed != {"cpu"})
