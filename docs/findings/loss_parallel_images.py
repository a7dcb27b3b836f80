# In loss_parallel, the gradient of logits of images is silently that of targets with height and width swapped
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 loss_parallel_images.py
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
logits = torch.zeros(1, 2, 2, 2)  # an image of two rows and two columns, with two classes for each of its points
targets = torch.tensor([[[0, 1], [0, 0]]])
plain = logits.clone().requires_grad_()
functional.cross_entropy(plain, targets, reduction="sum").backward()
own = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
with loss_parallel():
    functional.cross_entropy(own, targets, reduction="sum").backward()
assert plain.grad is not None
report(plain.grad.tolist(), own.grad.full_tensor().tolist())
