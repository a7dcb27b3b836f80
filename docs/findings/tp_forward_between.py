# with a param_dtype, a forward without a backward makes FSDP1 lose the gradients that the next backward adds to
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_forward_between.py
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


low = MixedPrecision(param_dtype=torch.bfloat16)
options = {"device_id": torch.device("cpu"), "use_orig_params": True}
model = FullyShardedDataParallel(nn.Linear(4, 1, bias=False), mixed_precision=low, **options)
model(torch.ones(4)).sum().backward()
model(torch.ones(4))  # for example to look at an output between two parts of a batch
model(torch.ones(4)).sum().backward()
report([[2.0, 2.0]], [p.grad.tolist() for p in model.parameters() if p.grad is not None])
