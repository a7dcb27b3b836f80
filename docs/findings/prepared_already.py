# PrepareModuleInput and -Output silently pass a DTensor that lacks the desired layout, if told that it has it
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 prepared_already.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


# "desired_input_layouts: this is used to ensure the inputs of the nn.Module have the desired DTensor layouts", which it
# does of a DTensor in a third layout: told Shard(1) instead, it gives the whole tensor
mesh = init_device_mesh("cpu", (size,))
style = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=True)
module = parallelize_module(nn.Identity(), mesh, style)
whole = torch.arange(4.0)
report(whole.tolist(), module(distribute_tensor(whole, mesh, [Shard(0)])).tolist())
