# with a quantization hook, every backward of DDP on gloo fails
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_quantized.py
# It exits with 1 where the defect is there: the hooks take the first tensor of what a future gives for a list of them.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


observed = []
for kind in DDPCommHookType.QUANTIZE_PER_TENSOR, DDPCommHookType.QUANTIZE_PER_CHANNEL:
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    register_ddp_comm_hook(kind, model)
    try:
        model(torch.tensor([[0.0, 510.0 * (rank + 1)]])).sum().backward()
        observed.append(str(model.module.weight.grad.round().tolist()))
    except RuntimeError as e:
        observed.append(next(line for line in str(e).splitlines() if "Error" in line))
report([str([[0.0, 765.0]])] * 2, observed)
