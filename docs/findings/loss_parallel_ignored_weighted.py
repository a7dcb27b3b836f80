# In loss_parallel, the backward of a weighted cross-entropy raises an error if a target is ignored as -100
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 loss_parallel_ignored_weighted.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
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
target, weight = torch.tensor([1, -100, 3]), torch.ones(4)
plain = torch.eye(3, 4).requires_grad_()
functional.cross_entropy(plain, target, weight=weight, reduction="sum").backward()
logits = distribute_tensor(torch.eye(3, 4), mesh, [Shard(1)]).requires_grad_()
with loss_parallel():
    given = (distribute_tensor(x, mesh, [Replicate()]) for x in (target, weight))
    loss = functional.cross_entropy(logits, next(given), weight=next(given), reduction="sum")
    try:
        loss.backward()
        observed: object = torch.allclose(plain.grad, logits.grad.full_tensor())
    except RuntimeError as error:
        observed = str(error)
report(True, observed)
