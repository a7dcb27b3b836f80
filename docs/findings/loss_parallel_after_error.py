# An error in loss_parallel leaves its losses in place: gradients of log_softmax are wrong, losses of replicas raise
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 loss_parallel_after_error.py
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
logits, target = (distribute_tensor(x, mesh, [Replicate()]) for x in (torch.eye(4), torch.arange(4)))
classes = distribute_tensor(torch.eye(4), mesh, [Shard(1)]).requires_grad_()


def gradient() -> list[float]:
    """Return the first row of the gradient of log_softmax, weighted by ones on the diagonal."""
    classes.grad = None
    (functional.log_softmax(classes, -1) * logits).sum().backward()
    return [round(x, 3) for x in classes.grad.full_tensor()[0].tolist()]


expected = [functional.cross_entropy(logits, target).full_tensor().item(), gradient()]
try:
    with loss_parallel():
        raise KeyError
except KeyError:
    pass
try:
    observed: object = functional.cross_entropy(logits, target).full_tensor().item()
except ValueError as error:
    observed = str(error)
report(expected, [observed, gradient()])
