# context_parallel without buffers, which are documented as optional, raises IndexError: list index out of range
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 context_parallel_no_buffers.py
# It exits with 1 where the defect is there. Attention alone needs no buffers: "patch the SDPA with the CP-enabled one".

import sys
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
observed = expected = "nothing"
try:
    with context_parallel(init_device_mesh("cpu", (dist.get_world_size(),))):
        pass
except IndexError as error:
    observed = f"IndexError: {error}"
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
