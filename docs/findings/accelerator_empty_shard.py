# a sharded tensor without a shard on this rank asks CUDA for its device, unless its group is gloo's
# unreported
# Seen on the sample accelerator (fixtures/vendors/sim; it has to be installed) with torch 2.13.0+cpu, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 accelerator_empty_shard.py
# It exits with 1 where the defect is there.

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor

rank, device = int(os.environ["RANK"]), torch.accelerator.current_accelerator()
torch.accelerator.set_device_index(rank)
dist.init_process_group(dist.get_default_backend_for_device(device))
group = dist.distributed_c10d._get_default_group()
row = torch.ones(1, 3, device=device)  # of one row, rank 1 has nothing
sharded = _create_chunk_sharded_tensor(row, rank, 2, 2, group)
try:
    observed = sharded.device.type
except Exception as e:
    observed = f"{type(e).__name__}: {str(e).splitlines()[0]}"
print(f"rank {rank}: expected {device.type}, observed {observed}", flush=True)
dist.barrier()
os._exit(observed != device.type)
