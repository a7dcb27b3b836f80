# In loss_parallel, the gradient of a log_softmax passes through it unchanged, but for that of cross_entropy
# https://github.com/pytorch/pytorch/issues/190746
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 loss_parallel_functions.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (size,))
logits, weights = torch.arange(8.0).reshape(2, 4).sin(), torch.arange(8.0).reshape(2, 4)
plain = logits.clone().requires_grad_()
(functional.log_softmax(plain, -1) * weights).sum().backward()
own = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
with loss_parallel():
    (functional.log_softmax(own, -1) * distribute_tensor(weights, mesh, [Shard(1)])).sum().backward()
expected, observed = ([round(x, 2) for x in g.flatten().tolist()] for g in (plain.grad, own.grad.full_tensor()))
report(expected, observed)
