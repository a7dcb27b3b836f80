# the state dict of a module under FSDP1 has a buffer in buffer_dtype under the second name of a module
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_second_name.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


model = nn.ModuleDict({"one": nn.BatchNorm1d(2, affine=False), "two": nn.Linear(2, 2)})
model["same"] = model["one"]
low = MixedPrecision(buffer_dtype=torch.bfloat16)
model = FullyShardedDataParallel(model, mixed_precision=low, device_id=torch.device("cpu"), use_orig_params=True)
state = model.state_dict()
report([torch.float32] * 2, [state[f"{name}.running_mean"].dtype for name in ("one", "same")])
